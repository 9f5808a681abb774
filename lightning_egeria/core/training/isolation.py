"""Running steps that nothing else sees: neither callbacks, loggers and metrics, nor the module itself afterwards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from lightning_egeria.core.snapshots.module_attributes import ModuleAttributes
from lightning_egeria.core.snapshots.random_state import preserved_random_state

_outside: ContextVar[bool] = ContextVar("outside", default=False)
_HOOKS = {name for name in dir(pl.Callback) if callable(getattr(pl.Callback, name)) and not name.startswith("_")}


def is_outside_batch() -> bool:
    """Whether what runs now does not belong to the batch in progress; see `outside_batch`."""
    return _outside.get()


@contextlib.contextmanager
def outside_batch() -> Iterator[None]:
    """Mark what the body runs as no part of the batch in progress, so that caches ignore it."""
    token = _outside.set(True)
    try:
        yield
    finally:
        _outside.reset(token)


@contextlib.contextmanager
def dry_run(module: nn.Module) -> Iterator[None]:
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


@contextlib.contextmanager
def hidden(trainer: pl.Trainer, recorder: pl.Callback) -> Iterator[None]:
    """Hide training from every callback and logger but ``recorder``; the hidden ones stay readable."""
    loggers, callbacks = trainer.loggers, trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
    trainer.loggers = [muted_logger(logger) for logger in loggers]
    try:
        with (
            with_callbacks(trainer, recorder, *map(muted_callback, callbacks)),
            without_logs(trainer.lightning_module),
        ):
            yield
    finally:
        trainer.loggers = loggers


@contextlib.contextmanager
def saving_later(trainer: pl.Trainer) -> Iterator[list[tuple[str, bool]]]:
    """Keep calls of ``trainer.save_checkpoint`` for later: a signal handler may call it within a branch.

    Yields:
        Path, and whether only weights are wanted, of each.
    """
    waiting: list[tuple[str, bool]] = []

    def save_checkpoint(filepath: Any, weights_only: bool = False, *args: Any, **kwargs: Any) -> None:
        waiting.append((os.fspath(filepath), bool(weights_only)))

    before = vars(trainer).get("save_checkpoint")
    vars(trainer)["save_checkpoint"] = save_checkpoint
    try:
        yield waiting
    finally:
        vars(trainer).pop("save_checkpoint", None)
        if before is not None:
            vars(trainer)["save_checkpoint"] = before


class Muted:
    """Stands in for an object: some of its methods do nothing, and attributes that are set do not reach it.

    It passes for an instance of the class of the object.

    Args:
        real: the object.
        mutes: whether the method of a name does nothing.
    """

    def __init__(self, real: Any, mutes: Callable[[str], bool]) -> None:
        self._real, self._mutes = real, mutes

    @property  # type: ignore[misc]  # `isinstance` asks for it
    def __class__(self) -> Any:
        """The class of the object."""
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        if name in ("_real", "_mutes"):  # while it is being copied
            raise AttributeError(name)
        value = getattr(self._real, name)
        return _ignore if callable(value) and self._mutes(name) else value

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._real

    def __hash__(self) -> int:
        return id(self._real)

    def __getitem__(self, name: Any) -> Any:
        return DummyLogger().experiment

    def __setitem__(self, name: Any, value: Any) -> None:
        """Take nothing."""


class _MutedLogger(Muted):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return Muted(value, lambda _: True) if name == "experiment" else value


def muted_callback(callback: pl.Callback) -> Any:
    """Return what stands in for a callback: its hooks do nothing.

    >>> stopping = muted_callback(pl.callbacks.EarlyStopping("loss", patience=7))
    >>> isinstance(stopping, pl.callbacks.EarlyStopping), stopping.patience, stopping.on_validation_end(None, None)
    (True, 7, None)
    """
    return Muted(callback, lambda name: name in _HOOKS)


def muted_logger(logger: Any) -> Any:
    """Return what stands in for a logger: it logs nothing, nor does its experiment.

    >>> logger = muted_logger(pl.loggers.CSVLogger("logs", version=3))
    >>> isinstance(logger, pl.loggers.CSVLogger), logger.log_metrics({"loss": 1.0}), logger.version
    (True, None, 3)
    """
    return _MutedLogger(logger, lambda name: name.startswith("log_") or name in ("save", "finalize", "watch"))


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the place of a method."""
