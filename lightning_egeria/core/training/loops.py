"""The training loop of Lightning: who asks, where it resumes, and how long an epoch is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_egeria.upstream.lightning import combined_loader, data_fetcher, data_source, set_data_source


class LoaderSource:
    """Stands in front of the Trainer's source of training loaders.

    Args:
        own: the Trainer's.
        through: gets the loaders, before Lightning begins to iterate over them; returns those to use instead.
    """

    def __init__(self, own: Any, through: Callable[[Any], Any]) -> None:
        self.own = own
        self._through = through

    @classmethod
    def install(cls, trainer: pl.Trainer, through: Callable[[Any], Any]) -> LoaderSource:
        """Have the loaders go through a function, until `remove`."""
        source = cls(data_source(trainer), through)
        set_data_source(trainer, source)
        return source

    def remove(self, trainer: pl.Trainer) -> None:
        """Let the loaders go through the function no more. Safe to call twice."""
        one = data_source(trainer)
        if one is self:
            set_data_source(trainer, self.own)
        while isinstance(one, LoaderSource):  # others may stand in front of this one
            if one.own is self:
                one.own = self.own
            one = one.own

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.own, name)

    def dataloader(self) -> Any:
        """Return the loaders to use."""
        return self._through(self.own.dataloader())


def telling(loaders: Any, begins: Callable[[list[Any]], None], loads: Callable[[], None]) -> CombinedLoader:
    """Return loaders, joined as Lightning joins them, that tell when an epoch begins.

    Args:
        loaders: as a user gives them to the Trainer.
        begins: gets the single ones before their iterators are made: these draw a seed, and workers begin to load.
        loads: called before the first batch is asked for: a sampler draws then, where there are no workers.
    """
    joined = copy.copy(loaders) if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    kind = type(joined)

    def begin(one: Any) -> Any:
        begins(list(one.flattened))
        one.is_new = True
        return kind.__iter__(one)

    def load(one: Any) -> Any:
        if one.is_new:
            one.is_new = False
            loads()
        return kind.__next__(one)

    joined.__class__ = type(kind.__name__, (kind,), {"__iter__": begin, "__next__": load})
    return joined


def fetches_batches(step: Callable[..., Any]) -> bool:
    """Whether a ``training_step`` or ``validation_step`` takes ``dataloader_iter``, and fetches batches itself."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def begins_again(trainer: pl.Trainer) -> bool:
    """Whether Lightning begins an epoch with a new iterator, and not with the one that it made with the loaders."""
    loop: Any = trainer.fit_loop
    is_resuming = getattr(loop, "is_resuming", False)  # of newer versions
    return trainer.current_epoch > 0 and not is_resuming and not loop.epoch_loop.restarting


def resumes_behind_a_validation(trainer: pl.Trainer) -> bool:
    """Whether the checkpoint was written in the validation behind an epoch, so that this epoch ends once more."""
    return resumes_at_an_end(trainer) and bool(getattr(trainer.fit_loop.epoch_loop, "restarted_on_last", False))


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
