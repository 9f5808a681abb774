"""When a change holds; `test_datamodule.py` and `test_exchange.py` have it in whole runs."""

import pytest
from torch.utils.data import DataLoader

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.methods.goodput.changing import BatchSizeChanges, planned_of
from lightning_egeria.methods.goodput.control import BatchSizeControl
from lightning_egeria.methods.goodput.decision import Division, ScriptedBatchSizes
from support.goodput import Seeing, adaptive, trained
from support.models import trainer_of


@pytest.fixture
def trainer():
    made = trainer_of(accumulate_grad_batches=2)
    made.strategy._lightning_module = Seeing()
    return made


def changes_of(trainer, schedule, local=(1, 4)):
    control = BatchSizeControl(8, 64, local, ScriptedBatchSizes(schedule, 64), 1, 1)
    return BatchSizeChanges(trainer, control, Ranks(), Division(4, 2, 1), Notices("goodput"))


def test_a_change_waits_until_steps_begin_together(trainer):
    changes = changes_of(trainer, {1: 12})
    adapted = AdaptedLoader(DataLoader(range(80), 4), trainer, print)
    drawn = iter(adapted.batches)
    for _ in range(2):
        next(drawn)
    changes.decide(1, adapted, None, 4, 1)
    assert (changes.planned.at, changes.planned.division) == (6, Division(4, 3, 1))
    state = changes.state()
    assert planned_of(state["planned"]) == changes.planned
    assert planned_of(None) is None
    assert [changes.reach(batch, 2) for batch in (3, 4, 5)] == [None] * 3
    assert trainer.accumulate_grad_batches == 2
    change = changes.reach(6, 3)
    assert (change.step, change.batch_size, change.batches, change.reason) == (3, 12, 3, "as scheduled")
    assert trainer.accumulate_grad_batches == 3
    changes.close()
    assert trainer.accumulate_grad_batches == 2


def test_an_epoch_that_ends_before_makes_the_change(trainer):
    changes = changes_of(trainer, {1: 12})
    adapted = AdaptedLoader(DataLoader(range(20), 4), trainer, print)
    drawn = iter(adapted.batches)
    for _ in range(3):
        next(drawn)
    changes.decide(1, adapted, None, 4, 2)
    assert changes.epoch_ended(3).batch_size == 12
    assert changes.epoch_ended(6) is None
    assert changes.now == Division(4, 3, 1)


def test_what_cannot_be_tried_is_told_of(trainer):
    changes = changes_of(trainer, {1: 32}, local=(1, None))
    adapted = AdaptedLoader(DataLoader(range(80), 4), trainer, print)
    with pytest.warns(UserWarning, match="larger batches are not tried in memory"):
        changes.decide(1, adapted, {"text": "no tensor"}, 4, 1)
    assert changes.planned.division == Division(32, 1, 1)


def test_a_batch_that_cannot_be_repeated_is_used_all_the_same():
    class Unique(Seeing):
        def training_step(self, batch, batch_idx):
            if len(set(batch[2].tolist())) < len(batch[2]):
                raise ValueError("a sample came twice")
            return super().training_step(batch, batch_idx)

    with pytest.warns(
        UserWarning, match="a batch of 32 samples could not be tried in memory: ValueError: a sample came"
    ):
        module, _ = trained(adaptive(batch_sizes={2: 32}), module=Unique())
    assert module.sizes == [8, 8, 32, 32, 32, 32, 16]
