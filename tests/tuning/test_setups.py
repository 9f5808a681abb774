"""Where branches can train, and how long."""

from types import SimpleNamespace

import lightning as L
import pytest

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.tuning.setups import batches_before_validation, check_trainer, most_steps
from support.models import Classifier


def trainer(
    batches=20, ready=0, accumulate=1, max_steps=-1, step=0, strategy="SingleDeviceStrategy", module=None, **more
):
    counted = SimpleNamespace(current=SimpleNamespace(ready=ready), total=SimpleNamespace(ready=40 + ready))
    loop = SimpleNamespace(batch_progress=counted, _should_check_val_epoch=lambda: True)
    return SimpleNamespace(
        num_training_batches=batches,
        accumulate_grad_batches=accumulate,
        max_steps=max_steps,
        global_step=step,
        strategy=type(strategy, (), {})(),
        lightning_module=module or Classifier(),
        fit_loop=SimpleNamespace(epoch_loop=loop),
        **{"enable_validation": False, "val_check_interval": 1.0, "check_val_every_n_epoch": 1} | more,
    )


SMALL, LARGE = SimpleNamespace(room=lambda copies: 2**27), SimpleNamespace(room=lambda copies: 4)


@pytest.mark.parametrize(
    ("arguments", "feed", "expected"),
    [
        ({}, SMALL, 19),
        ({"ready": 15}, SMALL, 4),
        ({"accumulate": 4}, SMALL, 4),
        ({"max_steps": 8, "step": 3}, SMALL, 4),
        ({"batches": 1}, SMALL, 0),
        ({}, LARGE, 4),
        ({"enable_validation": True, "val_check_batch": 5, "ready": 7}, SMALL, 2),
        ({"enable_validation": True, "val_check_batch": 6, "check_val_every_n_epoch": None}, SMALL, 1),
        ({"enable_validation": True, "val_check_batch": float("inf")}, SMALL, 19),
    ],
)
def test_most_steps_of_a_trial(arguments, feed, expected):
    assert most_steps(trainer(**arguments), feed) == expected


def test_a_share_of_an_epoch_follows_its_length():
    one = trainer(enable_validation=True, val_check_batch=5, val_check_interval=0.25)
    assert batches_before_validation(one, 0) == 4
    assert batches_before_validation(one, 0, length=80) == 19


def test_a_trainer_that_validates_by_the_clock_is_not_waited_for():
    """Lightning has no number of batches then, and no ``val_check_interval``."""
    one = trainer(enable_validation=True, val_check_batch=None)
    del one.val_check_interval
    assert most_steps(one, SMALL) == 19
    assert batches_before_validation(one, 0, length=80) > 80


def test_data_without_a_length_are_refused():
    with pytest.raises(UnsupportedError, match="must know where an epoch ends"):
        most_steps(trainer(batches=float("inf")), SMALL)


@pytest.mark.parametrize("strategy", ["ModelParallelStrategy", "FSDPStrategy", "DeepSpeedStrategy"])
def test_strategies_that_are_not_tested_are_refused(strategy):
    with pytest.raises(UnsupportedError, match=f"branch tuning (does not run|is not tested) with {strategy}"):
        check_trainer(trainer(strategy=strategy))
    check_trainer(trainer(strategy="DDPStrategy"))


@pytest.mark.skipif(not hasattr(L.pytorch.callbacks, "WeightAveraging"), reason="Lightning 2.6 has it")
def test_averages_of_weights_are_refused():
    averaged = trainer()
    averaged.callbacks = [L.pytorch.callbacks.WeightAveraging()]
    with pytest.raises(UnsupportedError, match="branch tuning does not run with WeightAveraging"):
        check_trainer(averaged)


def test_a_step_that_reads_batches_itself_is_refused():
    class Reads(Classifier):
        def training_step(self, dataloader_iter):
            pass

    with pytest.raises(UnsupportedError, match="branch tuning does not run with dataloader_iter"):
        check_trainer(trainer(module=Reads()))
