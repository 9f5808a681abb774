"""A schedule keeps its shape: it is that of a run which began with the rate."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.tuning.rates import LearningRate

SCHEDULES = {
    "none": None,
    "lambda": lambda optimizer, rate: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "step": lambda optimizer, rate: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer, rate: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "restarts": lambda optimizer, rate: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "onecycle": lambda optimizer, rate: lr_scheduler.OneCycleLR(optimizer, [rate, rate / 10], 12),
    "warmup": lambda optimizer, rate: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


def trainer_of(rate, make):
    parts = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [parts[0]], "lr": rate}, {"params": [parts[1]], "lr": rate / 10}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    schedulers = [make(optimizer, rate)] if make is not None else []
    return SimpleNamespace(
        optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=one) for one in schedulers]
    )


def rates(trainer, steps):
    seen = []
    for _ in range(steps):
        trainer.optimizers[0].step()
        for config in trainer.lr_scheduler_configs:
            config.scheduler.step()
        seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_that_of_a_run_with_the_rate(name):
    tunable = LearningRate()
    changed, expected = trainer_of(0.1, SCHEDULES[name]), trainer_of(0.4, SCHEDULES[name])
    tunable.check(changed)
    rates(changed, 4)
    tunable.set(changed, tunable.get(changed) * 4)
    assert tunable.get(changed) == pytest.approx(tunable.get(expected))
    wanted = rates(expected, 9)[4:]
    for got, want in zip(rates(changed, 5), wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-9)


def test_a_tensor_is_the_number_that_the_user_wrote():
    trainer = trainer_of(0.1, None)
    trainer.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.001)
    assert LearningRate().get(trainer) == 0.001


def test_an_optimizer_without_a_rate_is_refused():
    trainer = trainer_of(0.1, None)
    del trainer.optimizers[0].param_groups[0]["lr"]
    with pytest.raises(UnsupportedError, match="SGD has no learning rate, expected an lr"):
        LearningRate().check(trainer)


def test_the_value_is_exact():
    trainer = trainer_of(0.3, None)
    LearningRate().set(trainer, 0.1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert trainer.optimizers[0].param_groups[1]["lr"] == pytest.approx(0.01)


def test_a_rate_of_zero_and_a_foreign_scheduler_are_refused():
    class Mine(lr_scheduler.LRScheduler):
        def get_lr(self):
            return [0.1 for _ in self.base_lrs]

    with pytest.raises(UnsupportedError, match="Mine is not a scheduler of torch"):
        LearningRate().check(trainer_of(0.1, lambda optimizer, rate: Mine(optimizer)))
    with pytest.raises(UnsupportedError, match="the learning rate is 0"):
        LearningRate().check(trainer_of(0.0, None))


def test_the_base_rate_is_the_one_that_the_user_named():
    """Of a one-cycle schedule that is its peak, not the 25th part that it begins with."""
    for make in SCHEDULES.values():
        assert LearningRate().get(trainer_of(0.1, make)) == pytest.approx(0.1)
