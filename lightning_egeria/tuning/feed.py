"""The Trainer's batches, read ahead: branches train on the same ones, and training goes on behind the winner."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.snapshots.random_state import RandomState

MOST_BYTES = 2**30  # of batches that are kept


class _Kept(NamedTuple):
    item: Any  # as the data fetcher yields it, in host memory
    random: RandomState  # after it was loaded


class Feed:
    """Takes the place of the Trainer's data fetcher for an epoch.

    Args:
        fetcher: the data fetcher.
        before_batch: called each time before the training loop gets a batch.
    """

    _OWN = ("_fetcher", "_before_batch", "_kept")

    def __init__(self, fetcher: Any, before_batch: Callable[[], None]) -> None:
        self._fetcher = fetcher
        self._before_batch = before_batch
        self._kept: list[_Kept] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._fetcher, name, value)

    def __iter__(self) -> Feed:
        """Begin an epoch."""
        self._kept = []
        iter(self._fetcher)
        return self

    def __next__(self) -> Any:
        """Return the next batch of training."""
        self._before_batch()
        return self._kept.pop(0).item if self._kept else next(self._fetcher)

    @property
    def done(self) -> bool:
        """Whether training has had the last batch of the epoch."""
        return bool(self._fetcher.done) and not self._kept

    @property
    def fetcher(self) -> Any:
        """The Trainer's own data fetcher."""
        return self._fetcher

    def first_bytes(self) -> int:
        """Return the bytes of the next batch of training."""
        if not self._kept:
            self._load()
        return sum(leaf.nbytes for leaf in tensor_leaves(self._kept[0].item))

    def from_here(self, position: int) -> Iterator[Any]:
        """Yield batches for a branch, which trains on each before it asks for the next.

        The first branch to arrive at a batch loads it, so random numbers are drawn in the order of training without
        branches. All later ones continue with its random state.

        Args:
            position: number of batches that the branch has had.
        """
        while True:
            if position == len(self._kept):
                self._load()
            else:
                self._kept[position].random.restore()
            yield copy.deepcopy(self._kept[position].item)
            position += 1

    def _load(self) -> None:
        kept = move_data_to_device(copy.deepcopy(next(self._fetcher)), torch.device("cpu"))
        self._kept.append(_Kept(kept, RandomState.current()))

    def skip(self, batches: int) -> None:
        """Let training go on behind the first batches."""
        del self._kept[:batches]


class BranchFeed:
    """The data fetcher of a branch, which never has the last batch of an epoch."""

    done = False

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)
