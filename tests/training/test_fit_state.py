"""A fit returns to a moment, loop counters and frozen depth included."""

import lightning as L
import torch

from lightning_egeria import PrefixFreezing
from lightning_egeria.core.training.fit_state import FitState
from support.models import Classifier, equal, fit, images, loader, trainer_of


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


class Holds(Classifier):
    """Has an optimizer and a scheduler of its own, and changes settings of the Trainer and the data module."""

    def __init__(self):
        super().__init__()
        self.centre = torch.nn.Parameter(torch.ones(2))
        self.optimizers_of_its_own = {"centre": torch.optim.SGD([self.centre], 0.1, momentum=0.9)}
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers_of_its_own["centre"], 0.5)

    def on_train_batch_end(self, *args):
        self.centre.grad = torch.ones(2)
        self.optimizers_of_its_own["centre"].step()
        self.schedule.step()
        self.trainer.gradient_clip_val = float(self.global_step)
        self.trainer.datamodule.batches += 1


class Counted(L.LightningDataModule):
    batches = 0

    def train_dataloader(self):
        self.batches = 0
        return loader(images(96))


class Notes(L.Callback):
    """Notes what `Holds` has before each batch."""

    def __init__(self):
        self.noted = []

    def on_train_batch_start(self, trainer, pl_module, *args):
        rates, clip = pl_module.schedule.get_last_lr(), trainer.gradient_clip_val
        self.noted.append((pl_module.centre.tolist(), rates, clip, trainer.datamodule.batches))


def test_what_a_module_and_a_data_module_hold_returns_too():
    notes = Notes()
    trainer_of(Returns(), notes, epochs=1).fit(Holds(), datamodule=Counted())
    assert notes.noted[4] != notes.noted[6]
    assert notes.noted[7:9] == notes.noted[4:6]


def test_a_fit_returns_to_a_moment():
    for freezing in (None, PrefixFreezing()):
        returns, module = Returns(freezing), Classifier()
        fit(module, *([freezing] if freezing is not None else []), returns)
        assert 7 in returns.seen
        assert not equal(module, Classifier())
