"""The callback that follows the training batches."""

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_egeria import SelectiveBackprop
from lightning_egeria.methods.selecting.callback import SelectionCallback
from support.models import After, fit, images, loader
from support.selecting import Indexed, Noting, trained


class Fails(Noting):
    def training_step(self, batch, batch_idx):
        if self.global_step == 7:
            raise RuntimeError("injected")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("staleness", [0, 2])
def test_nothing_stays_on_the_trainer(staleness):
    module, trainer, _ = trained(staleness=staleness)
    assert not any(isinstance(one, SelectionCallback) for one in trainer.callbacks)
    assert "training_step" not in vars(module)


def test_nothing_stays_after_an_error():
    module, seen = Fails(), []
    look = After(lambda trainer, _: seen.append(trainer))
    with pytest.raises(RuntimeError, match="injected"):
        trained(images(40), look, module=module, staleness=2)
    assert not any(isinstance(one, SelectionCallback) for one in seen[0].callbacks)
    assert "training_step" not in vars(module)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_share_of_each_epoch_is_logged(tmp_path):
    data = SelectiveBackprop(loader(Indexed()), mode="in_batch", share=0.5)
    fit(Noting(), data=data, logger=CSVLogger(tmp_path), default_root_dir=tmp_path)
    (path,) = tmp_path.glob("**/metrics.csv")
    head, *lines = [line.split(",") for line in path.read_text().split()]
    assert [float(line[head.index("egeria/trained_share")]) for line in lines] == [1.0, 0.5, 0.5]
    assert [float(line[head.index("egeria/scored_share")]) for line in lines] == [0.0, 1.0, 1.0]


def test_losses_of_training_forwards_are_those_of_the_step():
    """With dropout, they are not those of an evaluation."""
    module, _, data = trained(epochs=1 + 1, staleness=5)
    mean = data.losses.of(module.ids[-1]).mean()
    assert mean == pytest.approx(module.losses[-1], rel=1e-5)


@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_a_batch_that_is_skipped_scores_the_next(mode):
    """The module ends the epoch before it."""

    class Skipping(Noting):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    module, _, data = trained(images(44), module=Skipping(), staleness=1, mode=mode, epochs=4)
    assert len(module.losses) == 12
    assert data.selection.trained == sum(map(len, module.ids))
