"""The Lightning callback that calls observers at each moment of training. It only translates hooks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_egeria.training.observers import Observers


class ObserverCallback(pl.Callback):
    """Calls a list of observers at each moment of training.

    Attributes:
        observers: the list, in the order of its calls.
    """

    def __init__(self) -> None:
        self.observers = Observers()
        self._steps_before = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is on its device."""
        self._steps_before = trainer.global_step
        self.observers.batch_start(batch, trainer.global_step)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is over."""
        self.observers.forward_end(loss)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward is over."""
        self.observers.backward_end()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is over, maybe with an optimizer step."""
        if batch is None:
            return  # the data loader yielded None; Lightning skipped the step, and `on_train_batch_start` with it
        self.observers.batch_end()
        if trainer.global_step > self._steps_before:
            self.before_optimizer_step_observers(trainer)
            self.observers.optimizer_step(trainer.global_step)

    def before_optimizer_step_observers(self, trainer: pl.Trainer) -> None:
        """Run after an optimizer step, before the observers' ``optimizer_step``. Does nothing by default."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch is over. Its last batch may have no end: the module's ``on_train_batch_start`` may return -1."""
        self.observers.epoch_end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Abort a batch that has no end."""
        self.observers.abort()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do the same as `teardown`, which Lightning does not call after an error."""
        self.observers.abort()
