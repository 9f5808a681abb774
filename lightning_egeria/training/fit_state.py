"""The state of a fit between two optimizer steps, to train from it several times."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_egeria.snapshots.module_attributes import ModuleAttributes
from lightning_egeria.snapshots.tensor_store import TensorStore
from lightning_egeria.snapshots.training_state import Stateful, TrainingState
from lightning_egeria.training.freezer import Freezer


class FitState:
    """The state of a fit at one moment. `restore` returns to it, any number of times, bit for bit.

    It holds the `TrainingState` of the model and its optimizers, learning-rate schedulers, the gradient scaler, the
    counters of Lightning's training loop, whether it should stop, attributes of modules, the frozen depth, and which
    other parameters train. The position in the data is the caller's, and so is the state of callbacks. Capture and
    restore between two optimizer steps; every rank its own.

    Args:
        trainer: the Trainer, in ``fit``.
        freezer: freezer of the model, if there is one.
        store: keeps the copies of tensors; None keeps them on the devices.
    """

    def __init__(self, trainer: pl.Trainer, freezer: Freezer | None = None, store: TensorStore | None = None) -> None:
        self._trainer = trainer
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
        self._logged_steps, self._should_stop = loop._batches_that_stepped, trainer.should_stop
        self._training = TrainingState(module, trainer.optimizers, others, store)  # before gradients are dropped
        self._prefix: dict[str, Any] | None = None
        if freezer is not None:
            self._prefix = freezer.prefix.state_dict()
            freezer.prefix.set_depth(0)  # what a freeze sets on modules is not part of their attributes
        self._attributes = ModuleAttributes(module, without=("_buffers",))  # `TrainingState` has them
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
        self._training.restore()
        for parameter, trains in self._trains:
            parameter.requires_grad_(trains)
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = self._logged_steps
        self._trainer.should_stop = self._should_stop
        if freezer is not None and self._prefix is not None:
            freezer.prefix.load_state_dict(self._prefix)
            freezer.update_reducer()
