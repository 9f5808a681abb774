"""Learning-rate schedules that depend on the length of the run, and modules that take one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from lightning_egeria.errors import ArgumentError


def step_decay(
    optimizer: Optimizer, total_steps: int, milestones: Sequence[float] = (0.5, 0.75), gamma: float = 0.1
) -> MultiStepLR:
    """Multiply the learning rate by `gamma` at given shares of the run.

    The defaults, 0.5 and 0.75, are those of ResNets on CIFAR-10 (He et al., CVPR 2016, section 4.2).

    Args:
        optimizer: the optimizer.
        total_steps: steps of the run.
        milestones: shares of the run, ascending; each in (0, 1).
        gamma: the factor.

    Raises:
        ArgumentError: if the milestones are not ascending, or not between 0 and 1.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> schedule = step_decay(optimizer, total_steps=8)
    >>> rates = []
    >>> for step in range(8):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 4))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    if list(milestones) != sorted(set(milestones)) or not all(0 < share < 1 for share in milestones):
        raise ArgumentError(f"milestones must be ascending shares of the run between 0 and 1, got {list(milestones)}")
    return MultiStepLR(optimizer, [round(share * total_steps) for share in milestones], gamma)


class ScheduledModule(L.LightningModule):
    """A LightningModule that takes its optimizer and scheduler as arguments.

    Args:
        optimizer: called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        scheduler: called with the optimizer; None keeps the learning rate.
        scheduler_interval: the scheduler steps after each optimizer `"step"` or each `"epoch"`.
        scheduler_length_name: name of the scheduler's argument for the length of the run in `scheduler_interval`, such
            as `"total_steps"` of OneCycleLR or `"T_max"` of CosineAnnealingLR; None if it has none.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None,
        scheduler_interval: str,
        scheduler_length_name: str | None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.scheduler_length_name = scheduler_length_name

    def configure_optimizers(self) -> Any:
        """Build the optimizer and the scheduler."""
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        arguments: dict[str, Any] = {}
        if self.scheduler_length_name is not None:
            per_step = self.scheduler_interval == "step"
            length = self.trainer.estimated_stepping_batches if per_step else self.trainer.max_epochs
            arguments[self.scheduler_length_name] = length
        scheduler = self.scheduler(optimizer, **arguments)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.scheduler_interval}}
