"""Jobs that share a device step by step: one computes while the others load data."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.core.programs import files
from lightning_egeria.core.training.observers import Observer, ObserverCallback
from lightning_egeria.errors import ArgumentError


class DeviceTurns(ObserverCallback):
    """Computes training batches in turns with other jobs of this machine that use the same file.

    A job holds the device from the start of a batch to its end, and leaves it while it loads data, validates or writes
    a checkpoint. A job that waits is next, before the one that has just had its turn. A job that ends, however it
    ends, leaves the device, because the system unlocks its files. Training is bit for bit that without the callback.

    Args:
        path: a file for each device, the same for all its jobs; made if it does not exist. On a local disk.

    Raises:
        ArgumentError: if it is a folder, or not a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        given: object = path
        if not isinstance(given, str | os.PathLike) or Path(given).is_dir():
            raise ArgumentError(f"path must be that of a file, such as 'device-0.lock', got {path!r}")
        self.path = Path(path)
        self._turns: _Turns | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the files."""
        self._close()
        self._turns = _Turns(self.path)
        self.observers.add(self._turns)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the device to the others."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the device to the others."""
        super().teardown(trainer, pl_module, stage)
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the device to the others."""
        super().on_exception(trainer, pl_module, exception)
        self._close()

    def _close(self) -> None:
        if self._turns is not None:
            self.observers.remove(self._turns)
            self._turns.close()
        self._turns = None


class _Turns(Observer):
    """The locks: a waiting process holds its place in the queue, so no other can pass it."""

    def __init__(self, path: Path) -> None:
        with contextlib.ExitStack() as stack:
            self._device = self._open(stack, path)
            self._queue = self._open(stack, path.with_name(f"{path.name}.queue"))
            self._files = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, path: Path) -> int:
        file = files.open_file(path, os.O_RDWR | os.O_CREAT, shared=True)  # users may share a device
        stack.callback(os.close, file)
        return file

    def batch_start(self, batch: Any, step: int) -> None:
        files.try_lock(self._queue, wait=True)
        files.try_lock(self._device, wait=True)
        files.unlock(self._queue)

    def batch_end(self) -> None:
        files.unlock(self._device)

    def abort(self) -> None:
        self.batch_end()

    def close(self) -> None:
        self._files.close()
