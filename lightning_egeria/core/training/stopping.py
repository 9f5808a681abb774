"""Stopping a job from outside, at any moment between two of its batches."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import lightning.pytorch as pl


@runtime_checkable
class Stops(Protocol):
    """A callback that ends the process when the job is asked to stop."""

    @property
    def is_asked(self) -> bool:
        """Whether the job was asked to stop."""

    def stop(self, trainer: pl.Trainer) -> None:
        """Save, and end the process. Every rank must call it."""


def is_to_stop(trainer: pl.Trainer) -> bool:
    """Whether Lightning, or a callback that `Stops`, was asked to stop this process."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
    asked = any(isinstance(one, Stops) and one.is_asked for one in callbacks)
    return asked or bool(getattr(trainer, "received_sigterm", False))


def stop(trainer: pl.Trainer) -> None:
    """Let the first callback that `Stops` do so, if there is one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the connectors set it
        if isinstance(callback, Stops):
            callback.stop(trainer)
