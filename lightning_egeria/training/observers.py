"""The moments of training, and the one list of observers that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
