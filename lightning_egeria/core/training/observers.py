"""The moments of training: the observers that follow them, and the callback that calls these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


class Observer:
    """Follows the moments of training. Override the methods you need; all of them do nothing by default.

    Each training batch calls ``batch_start``, ``forward_end``, ``backward_end`` and ``batch_end``, then
    ``optimizer_step`` if the optimizer stepped. With gradient accumulation, only the last batch of a window has an
    optimizer step. With manual optimization, a batch may have several backwards, each with its ``forward_end`` and
    ``backward_end``. A batch whose training step returns None has neither. A batch that training leaves early calls
    ``abort`` instead of ``batch_end``.
    """

    def batch_start(self, batch: Any, step: int) -> None:
        """The training step is about to run.

        Args:
            batch: the argument of the training step, on its device.
            step: number of optimizer steps so far.
        """

    def forward_end(self, loss: Tensor) -> None:
        """The forward is over; the backward of ``loss`` comes next."""

    def backward_end(self) -> None:
        """The backward is over; the optimizer has not stepped yet."""

    def batch_end(self) -> None:
        """The batch is over, with or without an optimizer step."""

    def optimizer_step(self, step: int) -> None:
        """The optimizer stepped with this batch, and the frozen depth is decided.

        Args:
            step: number of optimizer steps so far.
        """

    def abort(self) -> None:
        """The batch has no end: training stopped, or Lightning skipped the step."""

    def epoch_end(self) -> None:
        """The epoch is over, with its validation."""


class Observers(Observer):
    """Calls several observers at each moment, in a fixed order.

    ``batch_start`` and ``optimizer_step`` run from the first observer to the last. All others run from the last to the
    first, as context managers nest, so observers that replace ``forward`` methods restore them in the right order. An
    observer added in the middle of a batch is called for the moments that remain.

    >>> class Printer(Observer):
    ...     def __init__(self, name): self.name = name
    ...     def batch_start(self, batch, step): print(self.name, "starts")
    ...     def batch_end(self): print(self.name, "ends")
    >>> observers = Observers(Printer("outer"), Printer("inner"))
    >>> observers.batch_start(None, 0)
    outer starts
    inner starts
    >>> observers.batch_end()
    inner ends
    outer ends
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)
        self._in_batch = False

    def __iter__(self) -> Iterator[Observer]:
        return iter(list(self._observers))

    def add(self, observer: Observer, position: int | None = None) -> None:
        """Add an observer at the end, or in front of the one at ``position``."""
        self._observers.insert(len(self._observers) if position is None else position, observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer; does nothing if it is not in the list."""
        if observer in self._observers:
            self._observers.remove(observer)

    def batch_start(self, batch: Any, step: int) -> None:
        """Call all, first to last, after aborting an earlier batch that had no end."""
        self.abort()
        self._in_batch = True
        for observer in list(self._observers):
            observer.batch_start(batch, step)

    def forward_end(self, loss: Tensor) -> None:
        """Call all, last to first."""
        for observer in reversed(list(self._observers)):
            observer.forward_end(loss)

    def backward_end(self) -> None:
        """Call all, last to first."""
        for observer in reversed(list(self._observers)):
            observer.backward_end()

    def batch_end(self) -> None:
        """Call all, last to first."""
        self._in_batch = False
        for observer in reversed(list(self._observers)):
            observer.batch_end()

    def optimizer_step(self, step: int) -> None:
        """Call all, first to last."""
        for observer in list(self._observers):
            observer.optimizer_step(step)

    def abort(self) -> None:
        """Call all, last to first, if a batch has begun and not ended."""
        if self._in_batch:
            self._in_batch = False
            for observer in reversed(list(self._observers)):
                observer.abort()

    def epoch_end(self) -> None:
        """Call all, last to first, after aborting a batch that had no end."""
        self.abort()
        for observer in reversed(list(self._observers)):
            observer.epoch_end()


class ObserverCallback(pl.Callback):
    """Calls a list of observers at each moment of training. It only translates Lightning's hooks.

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
