"""Learning-rate schedules that are told the length of the run."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from lightning_egeria.errors import ArgumentError


def step_decay(
    optimizer: Optimizer, total_steps: int, milestones: Sequence[float] = (0.5, 0.75), gamma: float = 0.1
) -> MultiStepLR:
    """Multiply the learning rate by `gamma` at some shares of the run.

    At 0.5 and 0.75, as He et al. (CVPR 2016, section 4.2) train ResNets on CIFAR-10.

    Args:
        optimizer: whose learning rates are set.
        total_steps: steps of the run.
        milestones: shares of the run, ascending; each in (0, 1).
        gamma: the factor.

    Raises:
        ArgumentError: the milestones are not ascending, or not between 0 and 1.

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
        raise ArgumentError(f"milestones must be ascending shares of the run between 0 and 1, not {list(milestones)}")
    return MultiStepLR(optimizer, [round(share * total_steps) for share in milestones], gamma)


def with_scheduler(
    trainer: Any, optimizer: Optimizer, scheduler: Callable[..., LRScheduler] | None, interval: str, length: str | None
) -> Any:
    """What `configure_optimizers` of a LightningModule returns.

    Args:
        trainer: knows how long the run will be.
        optimizer: whose learning rate is scheduled.
        scheduler: called with the optimizer. None keeps the learning rate.
        interval: whether the scheduler steps after each optimizer `"step"` or each `"epoch"`.
        length: the name under which the scheduler takes the length of the run, counted in `interval`; None: it takes
            none.
    """
    if scheduler is None:
        return optimizer
    arguments = {}
    if length is not None:
        arguments[length] = trainer.estimated_stepping_batches if interval == "step" else trainer.max_epochs
    scheduled = {"scheduler": scheduler(optimizer, **arguments), "interval": interval}
    return {"optimizer": optimizer, "lr_scheduler": scheduled}
