"""Training that callbacks and loggers do not see: Lightning's own training loop, batch by batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_egeria.training.freezer import Freezer
from lightning_egeria.training.rehearsal import with_callbacks, without_logs
from lightning_egeria.training.silent import silent_callback, silent_logger
from lightning_egeria.upstream.lightning import count_logging_step, is_accumulating


class BranchRecorder(pl.Callback):
    """The only callback of `unseen` training: notes losses, and tells the freezer of the moments of training.

    Args:
        freezer: freezer of the model, if there is one.
    """

    def __init__(self, freezer: Freezer | None) -> None:
        self._freezer = freezer
        self._losses: list[Tensor | None] = []
        self._steps_before = 0

    def take(self) -> list[float | None]:
        """Return the loss of each batch since the last call; None where the training step returned none."""
        losses, self._losses = self._losses, []
        return [None if loss is None else float(loss) for loss in losses]

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Tell the freezer."""
        self._steps_before = trainer.global_step
        if self._freezer is not None:
            self._freezer.batch_start(None, trainer.global_step)

    def on_after_backward(self, *args: Any) -> None:
        """Tell the freezer."""
        if self._freezer is not None:
            self._freezer.backward_end()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Note the loss, and tell the freezer."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else None)
        if self._freezer is not None:
            self._freezer.batch_end()
            if trainer.global_step > self._steps_before:
                self._freezer.optimizer_step(trainer.global_step)


@contextlib.contextmanager
def unseen(trainer: pl.Trainer, recorder: BranchRecorder) -> Iterator[None]:
    """Let nothing but this callback see what a Trainer does meanwhile: others and loggers can only be read."""
    loggers, callbacks = trainer.loggers, trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
    trainer.loggers = [silent_logger(logger) for logger in loggers]
    try:
        with (
            with_callbacks(trainer, recorder, *map(silent_callback, callbacks)),
            without_logs(trainer.lightning_module),
        ):
            yield
    finally:
        trainer.loggers = loggers


def advance(trainer: pl.Trainer, feed: Any) -> None:
    """Train on a batch, as ``_TrainingEpochLoop.run`` does, without validation.

    Args:
        trainer: the Trainer.
        feed: its ``next`` is the batch.

    Raises:
        StopIteration: ``on_train_batch_start`` returned -1, which ends the epoch.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop.restarting = False
    loop.advance(feed)
    loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if not is_accumulating(trainer):
        count_logging_step(trainer)


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
