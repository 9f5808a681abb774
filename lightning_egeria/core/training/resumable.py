"""A Lightning callback that saves when the job is asked to stop, and resumes bit for bit in the middle of an epoch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.programs.processes import CHECKPOINT, PREEMPTED
from lightning_egeria.core.snapshots.random_state import LoadingState, RandomState
from lightning_egeria.core.training.checkpoints import check_version, checkpoint_read, count_of, warn_of_others
from lightning_egeria.core.training.loops import LoaderSource, begins_again, resumes_behind_a_validation, telling
from lightning_egeria.errors import ArgumentError, check_integers
from lightning_egeria.upstream.lightning import data_fetcher, loaders_keep_their_place, set_sampler_epoch

STATE_VERSION = 1
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class _Place(NamedTuple):
    """Where a checkpoint was written."""

    batches: int  # that the epoch has had; 0 between two epochs
    begun: LoadingState  # before the epoch
    first: RandomState  # before its first batch was asked for
    now: LoadingState


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
        self._steps_before = 0
        self._batches = 0  # of this epoch, so far
        self._is_over = False  # this epoch has had its last batch
        self._loaders: list[Any] = []
        self._begun = LoadingState.current([])  # before the loaders began this epoch
        self._first = self._begun.random  # before its first batch was asked for
        self._are_alike = True  # the loaders of the checkpoint and these, as far as generators show
        self._restored: _Place | None = None
        self._rank = 0
        self._ranks: list[dict[str, Any]] = []  # their states, while our own file is written
        self._source: LoaderSource | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """See when epochs begin with the loaders."""
        if stage == "fit":
            self._let_go(trainer)
            self._batches, self._is_over, self._restored = 0, False, None
            self._rank = trainer.global_rank

            def begin(loaders: list[Any]) -> None:
                self._begin(loaders, trainer.current_epoch)

            self._source = LoaderSource.install(trainer, lambda loaders: telling(loaders, begin, self._load))

    def _begin(self, loaders: list[Any], epoch: int) -> None:
        """Keep what draws the order of the samples; after a checkpoint, let it draw the same again."""
        self._loaders = loaders
        if self._restored is not None:
            for loader in loaders:
                set_sampler_epoch(loader, epoch)  # Lightning does so when workers have drawn
            self._are_alike = self._restored.begun.restore(loaders)
        self._begun = LoadingState.current(loaders)

    def _load(self) -> None:
        if self._restored is not None and self._restored.batches:
            self._restored.first.restore()
        self._first = RandomState.current()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to signals; return to the place of the checkpoint."""
        self._handlers = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        if not self._are_alike:  # only now, where Lightning can end training
            warn_of_others("resuming")
        place = self._restored
        if place is not None and place.batches:
            self._batches, fetcher = place.batches, data_fetcher(trainer)
            assert fetcher is not None
            # They are loaded, and not just left out: that returns what loading itself draws, in workers too.
            for _ in range(0 if loaders_keep_their_place(trainer) else place.batches):
                next(fetcher.iterator)
            place.now.random.restore()
        elif place is not None and resumes_behind_a_validation(trainer):
            place.now.restore(self._loaders)  # Lightning begins the next epoch with another iterator
        self._restored = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if that is due since the last epoch's end."""
        self._batches, self._is_over = 0, False
        if begins_again(trainer) and (self.every_n_steps is None or self._due):
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
        self._batches, self._is_over = batch_idx + 1, trainer.is_last_batch
        if trainer.global_step == self._steps_before:
            return  # gradients wait for more batches
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._due = True
        self._leaving = self._any_asked(trainer)
        # After the last batch there is more to do before the epoch is over: validation, and the learning rate.
        if (self._due or self._leaving) and not self._is_over:
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
        """Return the place in the epoch and the generators, in our own file those of each rank."""
        return {"version": STATE_VERSION, "ranks": self._ranks or [self._own_state()]}

    def _own_state(self) -> dict[str, Any]:
        now = LoadingState.current(self._loaders)
        within = self._batches > 0 and not self._is_over
        begun = self._begun if within else now
        return {
            "batches": self._batches if within else 0,
            "begun": begun.to_plain(),
            "first": self._first.to_plain(),
            "now": now.to_plain(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts.

        Raises:
            CheckpointError: if it is damaged, or another version of this class wrote it.
        """
        check_version(state_dict, STATE_VERSION, "resuming")
        with checkpoint_read("resuming"):
            ranks = state_dict["ranks"]
            own = ranks[self._rank % max(1, len(ranks))]
            begun, now = (LoadingState.from_plain(own[name]) for name in ("begun", "now"))
            self._restored = _Place(count_of(own["batches"]), begun, RandomState.from_plain(own["first"]), now)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        self._deafen()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the loaders."""
        self._let_go(trainer)
        self._loaders = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop listening; Lightning does not call `on_train_end` after an error."""
        self._let_go(trainer)
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

    def _save(self, trainer: pl.Trainer) -> None:
        beside = self.path.with_name(f".{self.path.name}")
        if trainer.is_global_zero and beside.is_symlink():
            beside.unlink()  # another user may have put it there
        self._ranks = Ranks(trainer.strategy.root_device).each(self._own_state())
        try:
            trainer.save_checkpoint(beside)
        finally:
            self._ranks = []
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

    def _let_go(self, trainer: pl.Trainer) -> None:
        if self._source is not None:
            self._source.remove(trainer)
        self._source = None

    def _deafen(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


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
