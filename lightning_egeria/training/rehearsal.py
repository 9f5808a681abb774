"""Running the user's training step without leaving a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_egeria.snapshots.module_attributes import ModuleAttributes
from lightning_egeria.snapshots.random_state import preserved_random_state

_apart: ContextVar[bool] = ContextVar("apart", default=False)


def is_apart() -> bool:
    """Whether what runs now is `apart` from the batch in progress."""
    return _apart.get()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Say that what the body runs does not belong to the batch in progress, so that no cache takes it for that."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


@contextlib.contextmanager
def rehearsal(module: nn.Module) -> Iterator[None]:
    """Run training steps of a module that leave no trace in its attributes, buffers, metrics and logs.

    ``self.log`` and ``self.log_dict`` do nothing meanwhile. Attributes, buffers and the states of torchmetrics return
    to their values at the end, and so does the random state of torch, numpy and Python. Parameters, gradients and
    optimizers are the caller's, and so is what the step writes elsewhere: files, a logger's ``experiment``, objects
    that are no module.

    Args:
        module: the module; its submodules are included.
    """
    attributes = ModuleAttributes(module)
    try:
        with preserved_random_state(), without_logs(module):
            yield
    finally:
        attributes.restore()


@contextlib.contextmanager
def without_logs(module: nn.Module) -> Iterator[None]:
    """Let ``self.log`` and ``self.log_dict`` of a module and its submodules do nothing meanwhile."""
    names = ("log", "log_dict")
    parts = [part for part in module.modules() if isinstance(part, pl.LightningModule)]
    before = [{name: vars(part)[name] for name in names if name in vars(part)} for part in parts]
    try:
        for part in parts:
            vars(part).update(dict.fromkeys(names, _ignore))
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            for name in names:
                vars(part).pop(name, None)
            vars(part).update(own)


@contextlib.contextmanager
def with_callbacks(trainer: pl.Trainer, *callbacks: pl.Callback) -> Iterator[None]:
    """Let a Trainer have these callbacks only meanwhile."""
    before, trainer.callbacks = trainer.callbacks, list(callbacks)  # type: ignore[attr-defined]  # the connectors set it
    try:
        yield
    finally:
        trainer.callbacks = before  # type: ignore[attr-defined]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the place of ``self.log``."""
