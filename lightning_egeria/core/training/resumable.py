"""A Lightning callback that saves when the job is asked to stop, and resumes bit for bit in the middle of an epoch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.core.programs.processes import CHECKPOINT, PREEMPTED
from lightning_egeria.core.snapshots.random_state import LoadingState, RandomState
from lightning_egeria.core.training.checkpoints import checkpoint_read, count_of, return_to
from lightning_egeria.errors import ArgumentError, check_integers
from lightning_egeria.upstream.lightning import (
    combined_loader,
    data_fetcher,
    loaders_keep_their_place,
    set_sampler_epoch,
)

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class ResumableCheckpoints(pl.Callback):
    """Writes `last.ckpt` every few steps, and when the process gets SIGUSR1 or SIGTERM, which end it with status 75.

    A run that resumes from that file ends bit for bit as one that was not stopped, if it is deterministic otherwise:
    the generators of random numbers, those of loaders, samplers and datasets among them, and the place in the epoch
    return too. Batches before that place are loaded again, and skipped. This needs a loader with a length.

    Args:
        every_n_steps: optimizer steps between two files; None writes once an epoch, between two.
        folder: to write to; None takes the environment's EGERIA_CHECKPOINTS, which `egeria jobs` sets.

    Raises:
        ArgumentError: if ``every_n_steps`` is less than 1, or nothing names a folder.
    """

    def __init__(self, every_n_steps: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        if every_n_steps is not None:
            check_integers(1, every_n_steps=every_n_steps)
        named = folder or os.environ.get("EGERIA_CHECKPOINTS")
        if not named:
            raise ArgumentError("folder: expected a folder for last.ckpt, since EGERIA_CHECKPOINTS is not set")
        self.every_n_steps, self.path = every_n_steps, Path(named) / CHECKPOINT
        self._asked = False  # by a signal
        self._leaving = False  # as all ranks know
        self._due = False
        self._at_beginning = False  # of an epoch, where this process continues
        self._steps_before = 0
        self._batches = 0  # of this epoch, so far
        self._at_epoch_start: LoadingState | None = None
        self._restored: dict[str, Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to signals; return to the place of the checkpoint."""
        self._handlers = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        if self._restored is not None:
            self._go_on(trainer, self._restored)
            self._restored = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep what draws the order of the samples; save if that is due since the last epoch's end."""
        if self._at_beginning:  # the file was written here, and the order is drawn already
            self._at_beginning = False
            return
        self._batches, self._at_epoch_start = 0, LoadingState.current(_loaders(trainer))
        if trainer.current_epoch > 0 and (self.every_n_steps is None or self._due):
            self._save(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count optimizer steps."""
        self._steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after an optimizer step, if it is time, or if a save was asked for."""
        self._batches = batch_idx + 1
        if trainer.global_step == self._steps_before:
            return  # gradients wait for more batches
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._due = True
        self._leaving = self._any_asked(trainer)
        # After the last batch there is more to do before the epoch is over: validation, and the learning rate.
        if (self._due or self._leaving) and not trainer.is_last_batch:
            self._save(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Between two epochs, count the batches of the new one, where Lightning still counts those of the old one."""
        if trainer.training and not self._batches:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            progress["current"] = dict.fromkeys(progress["current"], 0)
            progress["is_last_batch"] = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and the generators."""
        now = RandomState.current()
        started = self._at_epoch_start or LoadingState(now)
        return {"batches": self._batches, "at_epoch_start": started.to_plain(), "now": now.to_plain()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts.

        Raises:
            CheckpointError: if it is damaged.
        """
        with checkpoint_read("resuming"):
            self._restored = {
                "batches": count_of(state_dict["batches"]),
                "at_epoch_start": LoadingState.from_plain(state_dict["at_epoch_start"]),
                "now": RandomState.from_plain(state_dict["now"]),
            }

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        self._deafen()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop listening; Lightning does not call `on_train_end` after an error."""
        self._deafen()

    @property
    def is_asked(self) -> bool:
        """Whether this process got a signal to stop."""
        return self._asked

    def stop(self, trainer: pl.Trainer) -> None:
        """Save between two batches, and end the process.

        Raises:
            SystemExit: with status 75.
        """
        self._leaving = True
        self._save(trainer)

    def _go_on(self, trainer: pl.Trainer, state: dict[str, Any]) -> None:
        """Load the batches again that the epoch has had, and return the generators to the checkpoint's state."""
        self._batches, self._at_epoch_start = state["batches"], state["at_epoch_start"]
        self._at_beginning = not self._batches
        if self._batches and loaders_keep_their_place(trainer):
            state["now"].restore()
            return
        return_to(self._at_epoch_start, _loaders(trainer), "resuming")
        batches = iter_of_epoch(trainer)
        if self._at_beginning:
            return
        # They are loaded, and not just left out: that returns what loading itself draws, in workers too.
        for _ in range(self._batches):
            next(batches)
        state["now"].restore()

    def _save(self, trainer: pl.Trainer) -> None:
        beside = self.path.with_name(f".{self.path.name}")
        if trainer.is_global_zero and beside.is_symlink():
            beside.unlink()  # another user may have put it there
        trainer.save_checkpoint(beside)
        if trainer.is_global_zero:
            beside.replace(self.path)
        trainer.strategy.barrier("resumable checkpoint")
        self._due = False
        if self._leaving:
            raise SystemExit(PREEMPTED)

    def _any_asked(self, trainer: pl.Trainer) -> bool:
        if trainer.world_size == 1:
            return self._asked
        return trainer.strategy.reduce_boolean_decision(self._asked, all=False)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _deafen(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def iter_of_epoch(trainer: pl.Trainer) -> Any:
    """Return the iterator over the training batches that the loop reads from, at the start of the epoch.

    In the first epoch it is the one that Lightning has made; later ones begin with the generators as they
    are now.
    """
    fetcher = data_fetcher(trainer)
    assert fetcher is not None
    set_sampler_epoch(trainer)  # Lightning does it later
    if trainer.current_epoch > 0:
        iter(fetcher)
    return fetcher.iterator


def _loaders(trainer: pl.Trainer) -> list[Any]:
    combined = combined_loader(trainer)
    return list(combined.flattened) if combined is not None else []


def is_to_stop(trainer: pl.Trainer) -> bool:
    """Whether Lightning, or `ResumableCheckpoints`, was asked to stop this process."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
    asked = any(isinstance(one, ResumableCheckpoints) and one.is_asked for one in callbacks)
    return asked or bool(getattr(trainer, "received_sigterm", False))


def stop(trainer: pl.Trainer) -> None:
    """Let the first `ResumableCheckpoints` save, and end the process, if there is one. Every rank must call it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the connectors set it
        if isinstance(callback, ResumableCheckpoints):
            callback.stop(trainer)
