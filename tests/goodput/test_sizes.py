"""Which batch sizes a run begins with; `test_datamodule.py` has it in whole runs."""

from types import SimpleNamespace

import pytest

from lightning_egeria.core.batches.batch_sampler import MutableBatchSampler
from lightning_egeria.core.snapshots.random_state import LoadingState
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import ArgumentError, CheckpointError, TrainingDataError
from lightning_egeria.methods.goodput.decision import Division
from lightning_egeria.methods.goodput.sizes import Sizes, first_sizes
from support.goodput import adaptive, numbered, trained

NOW = {"local": 32, "batches": 1, "replicas": 1}
PLACE = {"place": None, "generators": LoadingState.current([]).to_plain(), "done": 0}


def found(state=None, largest=64, local=None, replicas=1, samples=1000, done=0):
    batches = MutableBatchSampler(range(samples), 8)
    progress = SimpleNamespace(is_last_batch=False, current=SimpleNamespace(processed=done))
    loop = SimpleNamespace(restarting=bool(done), epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer = SimpleNamespace(world_size=replicas, accumulate_grad_batches=1, fit_loop=loop)
    again = []
    adapted = SimpleNamespace(batches=batches, samples=samples, resume=lambda *_: None, begin_again=again.append)
    sizes = first_sizes(trainer, adapted, state, largest, local, Notices("goodput"))
    assert again == ([done] if done else [])
    return sizes, batches.batch_size


def test_a_new_run_begins_with_the_loaders():
    assert found() == (Sizes(8, 64, (4, None), Division(8, 1, 1)), 8)
    assert found(local=(2, 16), replicas=2) == (Sizes(16, 64, (2, 16), Division(8, 1, 2)), 8)
    assert found(samples=20)[0].largest == 20
    assert found(samples=4)[0].largest == 8
    with pytest.raises(ArgumentError, match="8 samples, expected a size within local_batch_sizes"):
        found(local=(9, None))
    with pytest.warns(UserWarning, match="in the middle of an epoch without AdaptiveBatchSize"):
        assert found(done=3)[0].done == 3


def test_a_run_goes_on_within_its_limits():
    planned = {"at": 6, "reason": "", **NOW, "local": 64}
    state = {"initial": 8, "now": NOW, "planned": planned, **PLACE}
    sizes, size = found(state)
    assert (sizes.now, sizes.planned.division, size) == (Division(32, 1, 1), Division(64, 1, 1), 64)
    assert found(state, largest=32)[0].planned is None
    assert found(state, largest=16)[0].now == Division(8, 2, 1)
    assert found(state, local=(4, 16))[0].now == Division(16, 2, 1)
    assert found(state, replicas=2)[0].now == Division(16, 1, 2)
    accumulated = {**state, "now": {**NOW, "batches": 2}}  # 64 at once were not tried in memory
    assert found(accumulated, largest=63)[0].now == Division(31, 2, 1)
    assert found({**accumulated, "now": {**NOW, "local": 16, "batches": 4}}, replicas=2)[0].now == Division(16, 2, 2)
    with pytest.raises(CheckpointError, match="the goodput state in the checkpoint is damaged"):
        found({**state, "now": {}})


class ByTokens:
    """Batches of other sizes than ``batch_size``, as a sampler that groups by length makes them."""

    batch_size = 8

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([[0, 1], [2, 3, 4, 5], list(range(6, 22)), list(range(22, 40))])


def test_batches_that_are_larger_than_their_size_are_refused():
    with pytest.raises(TrainingDataError, match="ByTokens yields a batch of 16 samples, expected its batch_size of 8"):
        trained(adaptive(numbered(40, batch_size=1, batch_sampler=ByTokens()), batch_sizes={1: 16}))
