"""How long training will still take, for the policy `srtf` of the queue."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.core.programs.files import write_whole
from lightning_egeria.core.training.notices import Notices

EVERY_S = 30.0


class RemainingTime(pl.Callback):
    """Writes the seconds that training will still take, every 30 s and more often at first.

    They follow from the time since training began and the share of its epochs, or steps, that passed meanwhile. A run
    that names neither a number of epochs nor of steps tells nothing.

    Args:
        hints: file for the queue, which the variable EGERIA_HINTS names; None writes nothing.
    """

    def __init__(self, hints: str | os.PathLike[str] | None) -> None:
        self.hints = Path(hints) if hints is not None else None
        self._notices = Notices("remaining time")
        self._began = self._written = self._pause = self._share = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the time."""
        self._notices = Notices("remaining time")
        self._began = self._written = time.monotonic()
        self._pause, self._share = 1.0, share_done(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the file if it is time."""
        now = time.monotonic()
        if self.hints is None or not trainer.is_global_zero or now - self._written < self._pause:
            return
        self._written, self._pause = now, min(2 * self._pause, EVERY_S)
        share = share_done(trainer)
        if share > self._share:
            left = (now - self._began) * (1 - share) / (share - self._share)
            try:
                write_whole(self.hints, json.dumps({"version": 1, "seconds_left": round(left, 1)}) + "\n")
            except OSError as error:
                self._notices.warn(f"cannot write hints to {self.hints}: {error}. Training continues", once="hints")


def share_done(trainer: pl.Trainer) -> float:
    """Return the share of training that is done, from 0 to 1; 0 if its end is not known."""
    epochs, batches, steps = trainer.max_epochs, trainer.num_training_batches, trainer.max_steps
    shares = [trainer.global_step / steps] if steps > 0 else []
    if epochs is not None and epochs > 0 and batches and not math.isinf(batches):
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        shares.append((trainer.current_epoch + done / batches) / epochs)
    return min(max(shares, default=0.0), 1.0)
