"""What the training loader asks of the Trainer."""

from types import SimpleNamespace

import pytest

from lightning_egeria.methods.selecting.trainer_access import TrainerAccess
from support.methods import scripted


def side_of(**arguments):
    known = {"current_epoch": 2, "num_training_batches": 10, "max_epochs": 4, "max_steps": -1, "global_step": 15}
    return TrainerAccess(SimpleNamespace(**{**known, "callbacks": [], **arguments}), None)


@pytest.mark.parametrize(
    ("run", "share"),
    [
        ({}, 0.625),
        ({"max_epochs": -1, "max_steps": 20}, 0.75),
        ({"max_epochs": -1}, 0.0),
        ({"num_training_batches": float("inf")}, 0.5),
        ({"max_steps": 16}, 15 / 16),
    ],
)
def test_progress_is_a_share_of_the_run(run, share):
    assert side_of(**run).progress(5) == pytest.approx(share)


def test_length_and_place():
    assert (side_of().batches, side_of(num_training_batches=float("inf")).batches, side_of().epoch) == (10, None, 2)
    side = side_of(strategy=SimpleNamespace(root_device=None), global_rank=0, world_size=1)
    assert (side.rank, side.world_size, side.ranks.several) == (0, 1, False)


def test_a_callback_that_freezes_is_asked():
    freezing = scripted({})
    assert not side_of(callbacks=[freezing]).compares_next()
    freezing.will_compare = lambda ahead: ahead == 1
    assert side_of(callbacks=[freezing]).compares_next()
