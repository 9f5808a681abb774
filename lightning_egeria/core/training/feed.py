"""The Trainer's batches, read ahead: branches of a fit train on the same ones as it does itself.

Loading draws random numbers, and so does training. A fit without branches draws them in turn: load, train, load, train.
A branch that reads ahead must leave the generators so that the fit draws as if it had not been there:

*   The branch that arrives at a batch first loads it, in its own turn, as the fit would have.
*   The state of the generators behind the loading is kept with the batch, with whether loading drew at all.
*   Everything that has the batch later, another branch or the fit itself, goes on from that state if loading drew. If
    it did not (workers load, or nothing is random), the generators of training are left alone.
*   A batch is copied for each branch, since a training step may change it; the fit gets the kept one, last.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.errors import TrainingDataError
from lightning_egeria.upstream.lightning import data_fetcher, set_data_fetcher

MOST_BYTES = 2**30  # of batches that are kept


class _Kept(NamedTuple):
    item: Any  # as the data fetcher yields it, in host memory
    random: RandomState  # after it was loaded
    drew: bool  # whether loading drew random numbers


class ReadAhead:
    """Batches that several branches train on.

    It keeps what is loaded, with its random numbers. The cache's `Line` looks at ids ahead and loads nothing, and
    `numbered` holds one batch to know whether it is the last, so neither can stand in for it.

    Args:
        batches: loads them.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.kept: list[_Kept] = []
        self._batches = batches

    def load(self) -> None:
        """Load a further batch.

        Raises:
            TrainingDataError: if there is none.
        """
        before = RandomState.current()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise TrainingDataError(
                f"the training data ended after {len(self.kept)} batches of a trial, fewer than the loader's length. "
                "Let len() of the loader or its sampler return the number of batches"
            ) from None
        random = RandomState.current()
        kept = move_data_to_device(copy.deepcopy(batch), torch.device("cpu"))
        self.kept.append(_Kept(kept, random, random != before))

    def from_here(self, position: int, alike: bool = False) -> Iterator[Any]:
        """Yield batches for a branch, which trains on each before it asks for the next.

        The first branch to arrive at a batch loads it, so random numbers are drawn in the order of training without
        branches. If loading drew some, all later ones continue with its random state.

        Args:
            position: number of batches that the branch has had.
            alike: whether it has the random state of the first branch before each batch, whatever loading drew.
        """
        while True:
            if position == len(self.kept):
                self.load()
            elif alike or self.kept[position].drew:
                self.kept[position].random.restore()
            yield copy.deepcopy(self.kept[position].item)
            position += 1


class Feed:
    """Takes the place of the Trainer's data fetcher for an epoch.

    Args:
        fetcher: the data fetcher.

    Attributes:
        before_batch: what is called each time before the training loop gets a batch, by its owner.
        ahead: batches of training that were read ahead.
    """

    _OWN = ("_fetcher", "before_batch", "ahead")

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher
        self.before_batch: dict[Any, Callable[[], None]] = {}
        self.ahead = ReadAhead(fetcher)

    @classmethod
    def install(cls, trainer: pl.Trainer, owner: Any, before_batch: Callable[[], None]) -> Feed:
        """Have a function called before each batch of the epoch that begins, until `remove`; one feed serves all."""
        feed = data_fetcher(trainer)
        if not isinstance(feed, cls):
            feed = cls(feed)
            set_data_fetcher(trainer, feed)
        feed.before_batch[owner] = before_batch
        return feed

    @classmethod
    def remove(cls, trainer: pl.Trainer, owner: Any) -> None:
        """Call the function of an owner no more; without any, the Trainer has its data fetcher back. Safe to repeat."""
        feed = data_fetcher(trainer)
        if isinstance(feed, cls):
            feed.before_batch.pop(owner, None)
            set_data_fetcher(trainer, feed if feed.before_batch else feed.fetcher)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # while it is being copied
            raise AttributeError(name)
        return getattr(self._fetcher, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._fetcher, name, value)

    def __iter__(self) -> Feed:
        """Begin an epoch."""
        self.ahead = ReadAhead(self._fetcher)
        iter(self._fetcher)
        return self

    def __next__(self) -> Any:
        """Return the next batch of training."""
        for before_batch in [*self.before_batch.values()]:
            before_batch()
        if not self.ahead.kept:
            return next(self._fetcher)
        kept = self.ahead.kept.pop(0)
        if kept.drew:
            kept.random.restore()
        return kept.item

    @property
    def done(self) -> bool:
        """Whether training has had the last batch of the epoch."""
        return bool(self._fetcher.done) and not self.ahead.kept

    @property
    def fetcher(self) -> Any:
        """The Trainer's own data fetcher."""
        return self._fetcher

    def room(self, copies: int = 1) -> int:
        """Return how many batches like the next one of training may be kept, each this many times."""
        if not self.ahead.kept:
            self.ahead.load()
        return MOST_BYTES // max(1, copies * sum(leaf.nbytes for leaf in tensor_leaves(self.ahead.kept[0].item)))

    def skip(self, batches: int) -> None:
        """Let training continue behind the first batches."""
        del self.ahead.kept[:batches]

    def restart(self, batches: int) -> None:
        """Let training go through its loader again, in an epoch that has had this many batches."""
        iter(self)
        self._fetcher.fetched += batches


class BranchFeed:
    """The data fetcher of a branch, which never has the last batch of an epoch.

    Args:
        batches: of the branch.
        wait: returns when the device has done its work.

    Attributes:
        seconds: time that reading has taken.
    """

    done = False

    def __init__(self, batches: Iterator[Any], wait: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._batches = batches
        self._wait = wait

    def __next__(self) -> Any:
        """Return the next batch."""
        self._wait()
        started = time.perf_counter()
        batch = next(self._batches)
        self.seconds += time.perf_counter() - started
        return batch
