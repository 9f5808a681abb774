"""The loops of Lightning, seen from what they call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_FRAMES = 18  # from a loop to the iterator of a loader


def is_asked_by_loop() -> bool:
    """Whether a loop of Lightning asks for a loader or its iterator, and not a callback or the user's code."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if isinstance(frame.f_locals.get("self"), (_DataFetcher, _DataLoaderSource)):
            return True
        frame = frame.f_back
    return False


def fetches_batches(step: Callable[..., Any]) -> bool:
    """Whether a ``training_step`` or ``validation_step`` takes ``dataloader_iter``, and fetches batches itself."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def resumes_at_an_end(trainer: pl.Trainer) -> bool:
    """Whether the checkpoint was written behind the last batch of an epoch, before the epoch ended."""
    loop: Any = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    return bool(loop.restarted_mid_epoch and progress.is_last_batch and progress.current.processed > 0)


def count_epoch_behind_an_end(trainer: pl.Trainer) -> None:
    """Count the first epoch of a run that `resumes_at_an_end`, as its training starts. Safe to call twice.

    Lightning leaves that epoch out of its counters of epochs that have begun. A checkpoint from the middle of a later
    epoch then looks like one between two epochs, and the run that goes on from it trains an epoch twice.
    """
    epochs: Any = trainer.fit_loop.epoch_progress
    if resumes_at_an_end(trainer) and epochs.current.ready == epochs.current.processed:
        epochs.increment_ready()
        epochs.increment_started()
