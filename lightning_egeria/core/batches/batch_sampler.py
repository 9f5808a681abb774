"""A batch sampler whose batch size may change in the middle of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import BatchSampler

from lightning_egeria.errors import ArgumentError, TrainingDataError, check_integers


class MutableBatchSampler:
    """Cuts the order of a sampler into batches, of a size that may change between any two of them.

    The order is that of the sampler, whatever the sizes: each sample of an epoch comes once. Until the first `change`,
    the batches are those of `torch.utils.data.BatchSampler`, or those of ``source`` if that yields batches.

    A DataLoader with workers asks for some batches ahead. A change holds from the first batch that was not asked for.

    Args:
        source: yields ids, or lists of ids of ``batch_size`` each (a batch sampler, which may sort by length). It has a
            length.
        batch_size: samples in a batch, at first.
        drop_last: drop what remains at the end if it is smaller than a batch at first. It needs ids.
        yields_batches: whether ``source`` yields lists of ids.
        started: called when an epoch begins, before ``source`` is asked for its first id.

    Attributes:
        sampler: the source.
        drop_last: as above.
        most_samples: samples of an epoch to use, from its beginning; None uses all.
        announced: what `len` returns instead of the number of batches; None returns that.
        ids: all that were drawn in this epoch, in order.

    >>> batches = MutableBatchSampler(range(10), 2)
    >>> drawn = iter(batches)
    >>> next(drawn), len(batches)
    ([0, 1], 5)
    >>> batches.change(4)
    >>> list(drawn), len(batches)
    ([[2, 3, 4, 5], [6, 7, 8, 9]], 3)
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        drop_last: bool = False,
        yields_batches: bool = False,
        started: Callable[[], None] | None = None,
    ) -> None:
        check_integers(1, batch_size=batch_size)
        if not isinstance(source, Sized):
            raise ArgumentError(f"source must have a length, got {type(source).__name__}")
        self.sampler: Any = source
        self.drop_last = drop_last
        self.most_samples: int | None = None
        self.announced: int | None = None
        self.ids: list[Any] = []
        self._initial = self._size = batch_size
        self._yields_batches = yields_batches
        self._started = started
        self._planned: tuple[int, int] | None = None  # number of a batch in the epoch, and the size from it on
        self._resumed: tuple[Sequence[Any], list[int], Callable[[], object] | None] | None = None  # as in `resume`
        self._sizes: list[int] = []  # of the batches drawn in this epoch
        self._rest: int | None = None  # samples that remain in this epoch; None before it begins

    @classmethod
    def like(cls, batch_sampler: Any, started: Callable[[], None] | None = None) -> MutableBatchSampler:
        """Return one with the batches of another batch sampler.

        Raises:
            TrainingDataError: if that has no length, or no ``batch_size``.
        """
        kind = type(batch_sampler).__name__
        size = getattr(batch_sampler, "batch_size", None)
        if type(size) is not int or size < 1:
            raise TrainingDataError(
                f"the batch sampler {kind} has no batch_size, so its batch size cannot be changed. Give it an "
                "attribute batch_size, the number of samples in a batch"
            )
        try:
            len(batch_sampler)
        except TypeError:
            raise TrainingDataError(
                f"the batch sampler {kind} has no length, expected the number of batches of an epoch. Give it a __len__"
            ) from None
        if type(batch_sampler) is BatchSampler:
            return cls(batch_sampler.sampler, size, batch_sampler.drop_last, started=started)
        return cls(batch_sampler, size, yields_batches=True, started=started)

    @property
    def batch_size(self) -> int:
        """Samples in the next batch that is drawn."""
        return self._planned[1] if self._planned is not None and self._planned[0] <= self.drawn else self._size

    @property
    def initial_batch_size(self) -> int:
        """Samples in a batch at first."""
        return self._initial

    @property
    def drawn(self) -> int:
        """Number of batches drawn in this epoch, whether training has them yet or not."""
        return len(self._sizes)

    def size_of(self, batch: int) -> int:
        """Return the number of samples in a batch that was drawn, by its number in the epoch."""
        return self._sizes[batch]

    def samples_before(self, batch: int) -> int:
        """Return the number of samples in the first ``batch`` batches of this epoch, all of which were drawn."""
        return sum(self._sizes[:batch])

    def change(self, batch_size: int, at: int = 0) -> None:
        """Change the batch size.

        Args:
            batch_size: samples in a batch.
            at: number of the batch in this epoch from which on it holds, if that was not drawn yet. If the epoch ends
                before, it holds from the next epoch on.

        Raises:
            ArgumentError: if the size is not at least 1.
        """
        check_integers(1, batch_size=batch_size)
        self._take_plan()
        self._planned = (at, batch_size)
        self._take_plan()

    def resume(self, order: Sequence[Any], sizes: Sequence[int], ended: Callable[[], object] | None = None) -> None:
        """Let the next epoch be one that was left in its middle.

        Args:
            order: ids of the whole epoch.
            sizes: samples in each batch so far; the first of what remains is ``order[sum(sizes)]``.
            ended: called where the source would be asked for an id behind its last.
        """
        self._resumed = (order, list(sizes), ended)

    def forget_resumed(self) -> None:
        """Let the next epoch begin at its beginning."""
        self._resumed = None

    @property
    def full_length(self) -> int:
        """Number of batches in a whole epoch, at the size that its first batch will have."""
        size = self._planned[1] if self._planned is not None else self._size
        if self._yields_batches and size == self._initial and self.most_samples is None:
            return len(self.sampler)
        return self._cuts(self._limited(len(self.sampler) * (self._initial if self._yields_batches else 1)), size)

    def __len__(self) -> int:
        """Return the number of batches in this epoch, the ones drawn so far included."""
        if self.announced is not None:
            return self.announced
        rest = self._rest
        if rest is None:
            if self._resumed is not None:
                order, sizes, _ = self._resumed
                return len(sizes) + self._count(self._limited(len(order)) - sum(sizes), len(sizes))
            if self._yields_batches and self._plain and self.most_samples is None:
                return len(self.sampler)
            rest = self._limited(len(self.sampler) * (self._initial if self._yields_batches else 1))
        return self.drawn + self._count(rest, self.drawn)

    def __iter__(self) -> Iterator[list[Any]]:
        """Begin an epoch. A size that was planned for a later batch of the last one holds from the first."""
        if self._rest is not None and self._planned is not None:
            self._planned = (0, self._planned[1])
        self._sizes, self._rest, self.ids = [], None, []
        self._take_plan()
        return self._batches()

    @property
    def _plain(self) -> bool:
        return self._size == self._initial and self._planned is None

    def _batches(self) -> Iterator[list[Any]]:
        if self._started is not None:
            self._started()
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            order, sizes, ended = resumed
            self._sizes, self._rest = list(sizes), self._limited(len(order)) - sum(sizes)
            self.ids = list(order[: sum(sizes)])
            yield from self._cut(_followed(order[sum(sizes) :], ended))
        elif not self._yields_batches:
            self._rest = self._limited(len(self.sampler))
            yield from self._cut(iter(self.sampler))
        else:
            yield from self._joined(iter(self.sampler))
        self._rest = 0

    def _cut(self, ids: Iterator[Any]) -> Iterator[list[Any]]:
        # Torch's BatchSampler asks for ids until there are none: a sampler may draw from its generator behind the last.
        while self._rest:
            self._take_plan()
            wanted = self._size if self.most_samples is None else min(self._size, self._rest)
            batch = list(itertools.islice(ids, wanted))[: self._rest]
            if not batch or (self.drop_last and len(batch) < min(self._size, self._initial)):
                return
            self._drew(batch)
            yield batch
        if self.most_samples is None:
            next(ids, None)

    def _joined(self, batches: Iterator[Sequence[Any]]) -> Iterator[list[Any]]:
        """Yield the batches of the source as they are until the size changes; then join and cut what remains."""
        self._rest = self._limited(len(self.sampler) * self._initial)
        while self._plain and self._rest:
            batch = self._checked(next(batches, ()))[: self._rest]
            if not batch:
                return
            self._drew(batch)
            self._rest -= self._initial - len(batch)  # any batch may be short; the number of batches is known
            yield batch
        rest = list(itertools.chain.from_iterable(map(self._checked, batches)))  # to know how many there are
        self._rest = min(len(rest), self._rest)
        yield from self._cut(iter(rest))

    def _checked(self, batch: Iterable[Any]) -> list[Any]:
        found = list(batch)
        if len(found) > self._initial:
            raise TrainingDataError(
                f"{type(self.sampler).__name__} yields a batch of {len(found)} samples, expected its batch_size of "
                f"{self._initial} at most. The size of such batches cannot be changed"
            )
        return found

    def _drew(self, batch: list[Any]) -> None:
        assert self._rest is not None  # of an epoch that has begun
        self._sizes.append(len(batch))
        self.ids += batch
        self._rest -= len(batch)

    def _take_plan(self) -> None:
        if self._planned is not None and self._planned[0] <= self.drawn:
            self._size, self._planned = self._planned[1], None

    def _limited(self, samples: int) -> int:
        return samples if self.most_samples is None else min(samples, self.most_samples)

    def _count(self, samples: int, drawn: int) -> int:
        """Return the number of batches of the remaining samples."""
        count, size = 0, self._size
        if self._planned is not None:
            at, later = self._planned
            count = min(max(0, at - drawn), samples // size)
            if count == at - drawn or at <= drawn:
                samples, size = samples - count * size, later
            else:
                samples -= count * size
        return count + self._cuts(samples, size)

    def _cuts(self, samples: int, size: int) -> int:
        """Return the number of batches of one size in a number of samples."""
        whole, rest = divmod(samples, size)
        return whole + (rest >= min(size, self._initial) if self.drop_last else rest > 0)


def _followed(ids: Sequence[Any], ended: Callable[[], object] | None) -> Iterator[Any]:
    yield from ids
    if ended is not None:
        ended()
