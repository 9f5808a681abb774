"""Telling Lightning that an epoch has another number of batches than its loader had at first."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.upstream.lightning import combined_loader, data_fetcher


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
