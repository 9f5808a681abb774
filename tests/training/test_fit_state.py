"""A fit returns to a moment, loop counters and frozen depth included."""

import lightning as L
from models import Classifier, equal, fit

from lightning_egeria import PrefixFreezing
from lightning_egeria.training.fit_state import FitState


class Returns(L.Callback):
    """Keeps the state behind step 4 and returns to it behind step 7, once."""

    def __init__(self, freezing=None):
        self.freezing, self.state, self.seen = freezing, None, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        freezer = self.freezing.freezer if self.freezing is not None else None
        self.seen.append(trainer.global_step)
        if trainer.global_step == 4 and self.state is None:
            self.state = FitState(trainer, freezer)
            self.losses, self.weights = list(pl_module.losses), [p.clone() for p in pl_module.parameters()]
            if freezer is not None:
                freezer.freeze_to(1, "for the test")
        elif trainer.global_step == 4 + 3 and self.seen.count(7) == 1:
            self.state.restore()
            assert trainer.global_step == 4
            assert pl_module.losses == self.losses
            assert all(bool((a == b).all()) for a, b in zip(self.weights, pl_module.parameters(), strict=True))
            if freezer is not None:
                assert (freezer.depth, self.state.frozen_depth) == (0, 0)


def test_a_fit_returns_to_a_moment():
    for freezing in (None, PrefixFreezing()):
        returns, module = Returns(freezing), Classifier()
        fit(module, *([freezing] if freezing is not None else []), returns)
        assert 7 in returns.seen
        assert not equal(module, Classifier())
