"""The state of a fit between two optimizer steps, to train from it several times."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_egeria.core.snapshots.module_attributes import CodeValues, ModuleAttributes, constants_of
from lightning_egeria.core.snapshots.tensor_store import TensorStore
from lightning_egeria.core.snapshots.training_state import Stateful, TrainingState, held_by
from lightning_egeria.core.training.freezer import Freezer
from lightning_egeria.core.training.wrapping import WrappingDataModule

# Of a LightningModule, in and around a step.
_STEP_METHODS = (
    "forward",
    "training_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class FitState:
    """The state of a fit at one moment. `restore` returns to it, any number of times, bit for bit.

    It holds the `TrainingState` of the model and its optimizers, learning-rate schedulers, the gradient scaler,
    counters and settings of the Trainer and its training loop, attributes of modules, globals and closure variables of
    the code of a step, plain attributes of the data module, the frozen depth, and which other parameters train. The
    position in the data is the caller's, and so is the state of callbacks. Capture and restore between two optimizer
    steps; every rank its own.

    Args:
        trainer: the Trainer, in ``fit``.
        freezer: freezer of the model, if there is one.
        store: keeps the copies of tensors; None keeps them on the devices.
    """

    def __init__(self, trainer: pl.Trainer, freezer: Freezer | None = None, store: TensorStore | None = None) -> None:
        self._freezer = freezer
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        others: list[Stateful] = [
            *(config.scheduler for config in trainer.lr_scheduler_configs),
            *([scaler] if scaler is not None else []),
            loop.batch_progress,
            loop.scheduler_progress,
            loop.automatic_optimization.optim_progress,
            loop.manual_optimization.optim_step_progress,
        ]
        self._settings = [(one, constants_of(one)) for one in (trainer, trainer.fit_loop, loop, _innermost(trainer))]
        held = dict.fromkeys(one for part in module.modules() for one in held_by(part, Optimizer, LRScheduler))
        others += [one for one in held if isinstance(one, LRScheduler) and one not in others]
        optimizers = [one for one in held if isinstance(one, Optimizer) and one not in trainer.optimizers]
        # Before gradients are dropped.
        self._training = TrainingState(module, [*trainer.optimizers, *optimizers], others, store)
        self._prefix: dict[str, Any] | None = None
        if freezer is not None:
            self._prefix = freezer.prefix.state_dict()
            freezer.prefix.set_depth(0)  # what a freeze sets on modules is not part of their attributes
        self._attributes = ModuleAttributes(module, without=("_buffers",))  # `TrainingState` has them
        self._code = CodeValues([module], _STEP_METHODS)
        self._trains = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        if freezer is not None and self._prefix is not None:
            freezer.prefix.load_state_dict(self._prefix)

    @property
    def frozen_depth(self) -> int:
        """Number of frozen layer modules."""
        return int(self._prefix["depth"]) if self._prefix is not None else 0

    def restore(self) -> None:
        """Return to the moment of the capture. With a freezer, every rank must call it."""
        freezer = self._freezer
        if freezer is not None:
            freezer.prefix.set_depth(0)
        self._attributes.restore()
        self._code.restore()
        self._training.restore()
        for parameter, trains in self._trains:
            parameter.requires_grad_(trains)
        for one, constants in self._settings:
            vars(one).update(constants)
        if freezer is not None and self._prefix is not None:
            freezer.prefix.load_state_dict(self._prefix)
            freezer.update_reducer()

    def restore_parameters(self) -> None:
        """Write the values of the parameters back, and nothing else."""
        self._training.restore_parameters()


def _innermost(trainer: Any) -> Any:
    """The user's own data module; the Trainer, if there is none."""
    data = getattr(trainer, "datamodule", None)
    while isinstance(data, WrappingDataModule):
        data = data.datamodule
    return trainer if data is None else data
