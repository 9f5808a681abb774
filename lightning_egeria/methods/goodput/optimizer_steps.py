"""The learning rate of a step, and what schedulers count."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer


class ScaledSteps:
    """Multiplies the learning rates of an optimizer within its steps. Outside they are those of the schedule.

    Args:
        optimizer: the optimizer.

    Attributes:
        factors: of the next step, one for each parameter group or one for all. At 1, nothing is touched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.factors: NDArray[np.float64] | float = 1.0
        self._optimizer = optimizer
        self._before: list[Any] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._multiply),
            optimizer.register_step_post_hook(self._restore),
        ]

    def end(self) -> None:
        """Restore the learning rates of a step that was left, if there is one."""
        before, self._before = self._before, None
        for group, rate in zip(self._optimizer.param_groups, before or (), strict=False):
            group["lr"] = rate

    def remove(self) -> None:
        """Let go of the optimizer. Safe to call twice."""
        self.end()
        for handle in self._handles:
            handle.remove()

    def _multiply(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.end()
        if np.all(np.asarray(self.factors) == 1.0):
            return
        groups = self._optimizer.param_groups
        self._before = [group["lr"] for group in groups]
        for group, factor in zip(groups, np.broadcast_to(self.factors, len(groups)).tolist(), strict=True):
            group["lr"] = group["lr"] * factor

    def _restore(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.end()


def step_schedulers(trainer: pl.Trainer, times: int) -> None:
    """Step the schedulers that Lightning steps after each optimizer step, further times.

    Those of another frequency than 1, and those that look at a metric, are left to Lightning.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau:
            for _ in range(times):
                trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
