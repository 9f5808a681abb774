"""The training loop of Lightning: who asks, where it resumes, and how long an epoch is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_egeria.upstream.lightning import combined_loader, data_fetcher
from lightning_egeria.upstream.lightning import is_asked_by_loop as is_asked_by_loop


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
    epoch then looks like one between two epochs, and the run that resumes from it trains an epoch twice.
    """
    epochs: Any = trainer.fit_loop.epoch_progress
    if resumes_at_an_end(trainer) and epochs.current.ready == epochs.current.processed:
        epochs.increment_ready()
        epochs.increment_started()


def set_epoch_length(trainer: pl.Trainer, batches: int) -> None:
    """Let the epoch in progress, and those after it, have this many batches.

    Lightning asks the loader once and then counts. Validation in shares of an epoch (``val_check_interval`` as a float)
    follows. An interval in batches stays; an epoch with fewer validates at its end.

    Args:
        trainer: the Trainer, in `fit`.
        batches: number of batches in the epoch, the ones so far included.
    """
    loop: Any = trainer.fit_loop
    loader, fetcher = combined_loader(trainer), data_fetcher(trainer)
    if loader is not None:
        loader.limits = [math.inf] * len(loader.flattened)  # the length of the loader is the limit
    if fetcher is not None and fetcher.length is not None:
        fetcher.length = batches
        fetcher.done = fetcher.fetched >= batches
    if loop.max_batches == batches:
        return
    loop.max_batches = batches
    if getattr(trainer, "val_check_batch", None) in (None, math.inf) or trainer.check_val_every_n_epoch is None:
        return
    interval = trainer.val_check_interval
    share = int(batches * interval) if isinstance(interval, float) else min(interval, batches)
    trainer.val_check_batch = max(1, share)
