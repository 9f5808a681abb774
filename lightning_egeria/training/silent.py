"""Callbacks and loggers that a program can read, while nothing reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger

_HOOKS = {name for name in dir(pl.Callback) if callable(getattr(pl.Callback, name)) and not name.startswith("_")}


class Silent:
    """Stands in for an object: some of its methods do nothing, and attributes that are set do not reach it.

    It passes for an instance of the class of the object.

    Args:
        real: the object.
        silences: whether the method of a name does nothing.
    """

    def __init__(self, real: Any, silences: Callable[[str], bool]) -> None:
        self._real, self._silences = real, silences

    @property  # type: ignore[misc]  # `isinstance` asks for it
    def __class__(self) -> Any:
        """The class of the object."""
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        if name in ("_real", "_silences"):  # while it is being copied
            raise AttributeError(name)
        value = getattr(self._real, name)
        return _nothing if callable(value) and self._silences(name) else value

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._real

    def __hash__(self) -> int:
        return id(self._real)

    def __getitem__(self, name: Any) -> Any:
        return DummyLogger().experiment

    def __setitem__(self, name: Any, value: Any) -> None:
        """Take nothing."""


class _SilentLogger(Silent):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return Silent(value, lambda _: True) if name == "experiment" else value


def silent_callback(callback: pl.Callback) -> Any:
    """Return what stands in for a callback: its hooks do nothing.

    >>> stopping = silent_callback(pl.callbacks.EarlyStopping("loss", patience=7))
    >>> isinstance(stopping, pl.callbacks.EarlyStopping), stopping.patience, stopping.on_validation_end(None, None)
    (True, 7, None)
    """
    return Silent(callback, lambda name: name in _HOOKS)


def silent_logger(logger: Any) -> Any:
    """Return what stands in for a logger: it logs nothing, nor does its experiment.

    >>> logger = silent_logger(pl.loggers.CSVLogger("logs", version=3))
    >>> isinstance(logger, pl.loggers.CSVLogger), logger.log_metrics({"loss": 1.0}), logger.version
    (True, None, 3)
    """
    return _SilentLogger(logger, lambda name: name.startswith("log_") or name in ("save", "finalize", "watch"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of a method."""
