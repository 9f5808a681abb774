"""The learning rate, with the schedulers that own it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.tuning.spaces import Value

_OF_GROUPS = ("initial_lr", "max_lr", "min_lr")  # what schedulers keep in parameter groups
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


class LearningRate:
    """The base learning rate: the one that schedulers multiply, or the peak of a one-cycle schedule.

    That of the first parameter group counts.

    A change scales the rates of all parameter groups and schedulers by one factor, so a schedule keeps its shape.
    """

    changes_cost = False
    outside_checkpoints = False

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse schedulers whose rates cannot be scaled.

        Raises:
            UnsupportedError: if a scheduler is not one of torch, or the rate is 0.
        """
        for scheduler in _schedulers(trainer):
            if type(scheduler).__module__ != "torch.optim.lr_scheduler":
                raise UnsupportedError(
                    f"the scheduler {type(scheduler).__name__} is not a scheduler of torch, so its rates cannot be "
                    "scaled. Use one of torch.optim.lr_scheduler, or tune its argument with a CustomTunable"
                )
        if "lr" not in trainer.optimizers[0].param_groups[0]:
            raise UnsupportedError(
                f"{type(trainer.optimizers[0]).__name__} has no learning rate, expected an lr in its parameter groups. "
                "Tune its own option by its name"
            )
        if not self.get(trainer) > 0:
            raise UnsupportedError("the learning rate is 0, expected a base rate to scale. Start with a positive rate")

    def get(self, trainer: pl.Trainer) -> float:
        """Return the base rate."""
        return _base(trainer.optimizers[0])

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Scale all rates so that the base rate is ``value``."""
        factor = float(value) / self.get(trainer)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _scaled(group["lr"], factor)
                for name in _OF_GROUPS:
                    if name in group:
                        group[name] = _scaled(group[name], factor)
        for scheduler in _schedulers(trainer):
            for name in _OF_SCHEDULERS:
                if isinstance(vars(scheduler).get(name), list):
                    vars(scheduler)[name] = [_scaled(rate, factor) for rate in vars(scheduler)[name]]
        first = trainer.optimizers[0].param_groups[0]  # exactly, where the product is rounded
        name = _name(first)
        if not isinstance(first[name], Tensor):
            at_base = first["lr"] == first[name]
            first[name] = float(value)
            if at_base:
                first["lr"] = float(value)


def _base(optimizer: Optimizer) -> float:
    group = optimizer.param_groups[0]
    rate = group[_name(group)]
    return float(f"{float(rate):.7g}") if isinstance(rate, Tensor) else float(rate)  # as the user wrote it


def _name(group: Mapping[str, Any]) -> str:
    """Name of the base rate in a parameter group."""
    return next(name for name in ("max_lr", "initial_lr", "lr") if name in group)


def _scaled(rate: Any, factor: float) -> Any:
    if isinstance(rate, Tensor):
        return rate.mul_(factor)
    return rate * factor


def _schedulers(trainer: pl.Trainer) -> Iterator[Any]:
    """Yield the schedulers and those inside of them."""
    waiting: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    while waiting:
        scheduler = waiting.pop()
        yield scheduler
        waiting += [one for one in vars(scheduler).get("_schedulers", []) if isinstance(one, LRScheduler)]
