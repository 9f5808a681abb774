"""What the program does with batches under the cache, counted: where it makes the cache useless, the cache stops."""

from __future__ import annotations

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front

COUNTED = 20  # lazy batches, before it is decided whether inputs are left out and where the boundary is
OTHER = 6  # batches in a row that call the frozen layers in another way, before the cache stops
STRANGE = 20  # batches in a row without a match, before the cache stops


class Habits:
    """Counts what the program did with its last batches.

    Attributes:
        reader: who reads the input in most batches; None if nobody does.
    """

    def __init__(self) -> None:
        self.reader: str | None = None
        self._strange = self._other = 0
        self._begin()

    def _begin(self) -> None:
        self._lazy = self._touches = self._reruns = 0
        self._first = 10**9

    def why_stop(self, batch: CachedBatch, front: Front) -> str | None:
        """Count a batch that is over; return why the cache is of no use, or None."""
        served = batch.hits + batch.advanced > 0
        had_rows = any(read.future.done() and not read.future.cancelled() for read in batch.reads)
        self._strange = 0 if served or batch.plan.checks else self._strange + had_rows
        self._other = 0 if batch.matches else self._other + had_rows
        if self._other >= OTHER:
            return f"the last {OTHER} batches called the frozen layers in another way than before, or not at all"
        if self._strange >= STRANGE:
            return f"the inputs of the last {STRANGE} batches differed from those of the entries (random or mixed?)"
        return self._count_lazy(batch, front)

    def _count_lazy(self, batch: CachedBatch, front: Front) -> str | None:
        ran, front.ran = front.ran, set()
        if not any(batch.lazy):
            return None
        self._lazy += 1
        self._touches += batch.was_touched is not None
        if batch.hits == batch.samples and ran:
            self._reruns, self._first = self._reruns + 1, min(self._first, *ran)
        if self._lazy < COUNTED:
            return None
        reruns, touches, first = self._reruns, self._touches, self._first
        self._begin()
        if 2 * reruns > COUNTED:
            return f"something reads the output of {front.units[first].path!r} in most batches"
        self.reader = batch.was_touched if 2 * touches > COUNTED else None
        return None
