"""The batches of a loader with the ids of their samples, and loaders whose batches can be looked at first."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from lightning_egeria.core.batches.worker_calls import CallableWorkers

if TYPE_CHECKING:
    from lightning_egeria.caching.loader import Line

T = TypeVar("T")


class BatchSource:
    """The batches of a loader, with the ids of their samples.

    Ids are those of the sampler, also with worker processes. Loaders of iterable data, and loaders with their own way
    of going through the data, have no ids.

    Args:
        loader: the user's loader.
        wrap_collate: returns a collate function to use in the place of the user's; None: use the user's.

    Attributes:
        loader: as above.
        lookahead: of a loader of `FrozenPrefixCache`, whose batches can be looked at before they are trained; None of
            another.

    >>> import torch
    >>> source = BatchSource(DataLoader(torch.arange(5), batch_size=2, sampler=[4, 3, 2, 1, 0]))
    >>> [(batch.tolist(), ids) for batch, ids in source]
    [([4, 3], (4, 3)), ([2, 1], (2, 1)), ([0], (0,))]
    """

    def __init__(self, loader: Any, wrap_collate: Callable[[Any], Any] | None = None) -> None:
        self.loader = loader
        self._wrap_collate = wrap_collate
        self.lookahead: Line | None = getattr(type(loader), "lookahead", None)
        self._ids: deque[tuple[Any, ...]] = deque()
        self._running: Any = None  # iterates over the copy of the loader
        self._copies = LoaderCopies()

    @property
    def has_ids(self) -> bool:
        """Whether the samples have ids."""
        return self.lookahead is not None or _is_in_order(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, tuple[Any, ...] | None]]:
        # At once, as the user's does: it draws a random number and starts the workers.
        if self.lookahead is not None:
            self.lookahead.is_followed = True
            self.lookahead.wrap = self._wrap_collate
            return self._looked_at(iter(self.loader), self.lookahead)
        if not _is_in_order(self.loader):
            return ((batch, None) for batch in iter(self.loader))
        self._ids.clear()
        self._running = iter(self._recorded())
        return ((batch, self._ids.popleft()) for batch in self._running)

    def close(self) -> None:
        """Stop workers: of an epoch that was left, and those that were kept for the next. Safe to call twice."""
        if self._running is not None and self.loader.num_workers:
            self._running._shutdown_workers()
        self._running = None
        self._copies.close()

    @staticmethod
    def _looked_at(batches: Iterator[Any], lookahead: Line) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        for batch in batches:
            ids = lookahead.last_ids()
            yield batch, ids

    def _recorded(self) -> DataLoader[Any]:
        """A DataLoader like the user's, whose batch sampler is followed."""
        loader = self.loader
        collate = loader.collate_fn if self._wrap_collate is None else self._wrap_collate(loader.collate_fn)
        followed = BatchesThrough(loader.batch_sampler, self._noted)
        return self._copies.of(loader, dataset=loader.dataset, batch_sampler=followed, collate_fn=collate)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for ids in map(list, batches):
            self._ids.append(tuple(ids))
            yield ids


def copy_of(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Return a DataLoader like the user's, with other parts and with workers of its own.

    Args:
        loader: the user's loader.
        parts: attributes that are not the user's, by name.

    >>> loader = DataLoader(range(4), batch_size=2)
    >>> [batch.tolist() for batch in copy_of(loader, batch_sampler=[[3], [1, 0]])], len(loader)
    ([[3], [1, 0]], 2)
    """
    copied = copy.copy(loader)
    if "multiprocessing_context" in parts:
        copied.multiprocessing_context = parts.pop("multiprocessing_context")
    vars(copied).update(parts, _iterator=None)  # a DataLoader refuses to have these set
    return copied


class LoaderCopies:
    """Copies of the user's DataLoader with other parts; the last one is used again if its workers are."""

    def __init__(self) -> None:
        self._kept: tuple[Any, DataLoader[Any]] | None = None

    def of(self, loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
        """Return a copy; the one of the last epoch, with the same parts, if its workers are kept.

        Args:
            loader: the user's loader.
            parts: as in `copy_of`.
        """
        settings = (loader.batch_sampler, loader.num_workers, loader.worker_init_fn, loader.generator)
        if loader.persistent_workers and self._kept is not None and self._kept[0] == settings:
            return self._kept[1]
        if loader.persistent_workers:
            self.close()
        self._kept = (settings, copy_of(loader, **parts))
        return self._kept[1]

    def with_calls(self, loader: DataLoader[Any], **parts: Any) -> tuple[DataLoader[Any], CallableWorkers | None]:
        """Return a copy whose workers can be called until the next copy is made, and its workers.

        Args:
            loader: as in `of`.
            parts: as in `of`.
        """
        if not loader.num_workers:
            return self.of(loader, **parts), None
        context = CallableWorkers(loader.multiprocessing_context)
        copied = self.of(loader, multiprocessing_context=context, persistent_workers=True, **parts)
        found: Any = copied.multiprocessing_context  # of the epoch before, if its workers were kept
        return copied, found

    def close(self) -> None:
        """Stop workers that the last copy has kept. Safe to call twice."""
        iterator = vars(self._kept[1]).get("_iterator") if self._kept is not None else None
        if iterator is not None:
            iterator._shutdown_workers()
        self._kept = None


def numbered(batches: Iterator[T], total: int | None) -> Iterator[tuple[int, T, bool]]:
    """Number batches, and tell which is the last.

    Args:
        batches: of one epoch.
        total: how many of them to take; None takes all, and reads one ahead to know the last.

    >>> list(numbered(iter("abc"), None))
    [(0, 'a', False), (1, 'b', False), (2, 'c', True)]
    """
    if total is not None:
        for number, batch in zip(range(total), batches):  # noqa: B905  # there may be more
            yield number, batch, number + 1 == total
        return
    waiting: deque[T] = deque(itertools.islice(batches, 1))
    number = 0
    while waiting:
        waiting.extend(itertools.islice(batches, 1))
        yield number, waiting.popleft(), not waiting
        number += 1


class BatchesThrough:
    """The batches of a batch sampler, each through a function.

    Args:
        batch_sampler: yields lists of ids.
        through: takes them, and yields what the loader gets.
    """

    def __init__(self, batch_sampler: Any, through: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._batch_sampler, self._through = batch_sampler, through

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._through(iter(self._batch_sampler))  # at once, as a DataLoader asks its sampler


def why_no_ids(loader: Any) -> str | None:
    """Return why the samples of a loader have no ids; None if they have some."""
    if not isinstance(loader, DataLoader):
        return f"the data come from a {type(loader).__name__}, expected one torch DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__ or type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"{type(loader).__name__} has its own way of going through the data"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no sample ids"
    if loader.batch_sampler is None:
        return "the DataLoader makes no batches (batch_size=None), so samples have no ids"
    return None


def _is_in_order(loader: Any) -> bool:
    """Whether the samples have ids, and batches come in the order of the sampler."""
    return why_no_ids(loader) is None and getattr(loader, "in_order", True)
