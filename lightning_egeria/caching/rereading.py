"""Samples of the training loader once more, for a method that looks at batches and trains some of their samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.loader import Line
from lightning_egeria.snapshots.random_state import RandomState


class CachedRereading:
    """A `batches.reading.Rereading` of the training loader.

    Args:
        line: the way of the loader's batches.
        looking: see `Rereading.looking`.
        trains: called with the batch that is trained next; None for one without the cache.
    """

    def __init__(
        self,
        line: Line,
        looking: Callable[[], contextlib.AbstractContextManager[None]],
        trains: Callable[[CachedBatch | None], None],
    ) -> None:
        self.looking = looking
        self._line, self._trains = line, trains
        self._read: CachedBatch | None = None
        self._draws = False  # the collate function draws random numbers

    def last_ids(self) -> tuple[Any, ...]:
        """Return the ids of the samples of the last batch, in the order of its rows."""
        last = self._line.last
        if not isinstance(last, CachedBatch):
            return last.ids if last is not None else ()
        ids, order = last.plan.ids, last.tape.order
        return ids if order is None else tuple(ids[position] for position in order)

    def read(self, ids: Sequence[Any]) -> Any:
        """Return a batch from entries alone; None if some of its samples have none."""
        before = RandomState.current()
        found = None if self._draws else self._line.again(ids)
        if found is None:
            return None
        if RandomState.current() != before:
            before.restore()
            self._draws = True
            return None
        batch, self._read = found
        return batch

    def trains(self) -> None:
        """Have the batch read last, or else the last of the loader, go through the front in the next training step."""
        batch, self._read = self._read, None
        last = self._line.last
        self._trains(batch if batch is not None else last if isinstance(last, CachedBatch) else None)
