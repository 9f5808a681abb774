"""What the cache has done, whether it pays, and whether the program lets it."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterator

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front
from lightning_egeria.profiling.clock import seconds_between, wait_for

COMPARED_STEPS = 12  # of each kind, before it is decided whether the cache pays
COUNTED = 20  # lazy batches, before it is decided whether inputs are left out and where the boundary is
OTHER = 6  # batches in a row that call the frozen layers in another way, before the cache stops
STRANGE = 20  # batches in a row without a match, before the cache stops


@dataclasses.dataclass
class CacheStats:
    """What the cache has done in training, or in validation.

    Attributes:
        hits: samples whose frozen layers did not run.
        advanced: samples that came from a shallower boundary and ran only the layers that froze since.
        misses: samples that ran all frozen layers.
        not_loaded: samples that were not loaded.
        loaded_after_all: samples that the program read although the cache had not loaded them.
        to_write: entries that were handed to the writing thread.
        written: entries written.
        wrong: entries that were damaged or outdated.
        bytes_on_disk: size of the stores of this run.
        seconds_saved: estimate: hits times the seconds by which a sample's miss took longer than its hit, less those in
            which samples were loaded after all.
        depth: depth of the cached boundary; 0 if there is none.
        off: why the cache is off; None while it is on.
    """

    hits: int = 0
    advanced: int = 0
    misses: int = 0
    not_loaded: int = 0
    loaded_after_all: int = 0
    to_write: int = 0
    written: int = 0
    wrong: int = 0
    bytes_on_disk: int = 0
    seconds_saved: float = 0.0
    depth: int = 0
    off: str | None = "nothing is frozen"


class Accounts:
    """Counts samples, and compares the time of cached batches with the time of others.

    The time of a batch is the wait for it, and the time from the call of the network to the boundary.
    """

    def __init__(self, stats: CacheStats) -> None:
        self._stats = stats
        self._hit_seconds: deque[float] = deque(maxlen=50)
        self._miss_seconds: deque[float] = deque(maxlen=50)
        self._judged = False

    def restart(self) -> None:
        """Another boundary is cached."""
        self._hit_seconds.clear()
        self._miss_seconds.clear()
        self._judged = False

    def count(self, batch: CachedBatch) -> None:
        """Add a batch that is over."""
        stats, samples = self._stats, batch.samples
        stats.hits += batch.hits
        stats.advanced += batch.advanced
        stats.misses += samples - batch.hits - batch.advanced
        lazy = sum(batch.lazy)
        stats.not_loaded += 0 if batch.was_touched else lazy
        stats.loaded_after_all += lazy if batch.was_touched else 0
        if batch.began is None or batch.ended is None or not batch.is_timed:
            return
        wait_for(batch.ended)
        seconds = (batch.waited + seconds_between(batch.began, batch.ended)) / samples
        if batch.hits == samples:
            self._hit_seconds.append(seconds)
        elif not batch.hits and not batch.advanced and not batch.eager:
            self._miss_seconds.append(seconds)
        if batch.hits and self._hit_seconds and self._miss_seconds:
            stats.seconds_saved += batch.hits * (self._miss() - self._hit())

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While samples are loaded after all."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stats.seconds_saved -= time.perf_counter() - started

    def touched_late(self, batch: CachedBatch) -> None:
        """The inputs of a batch that was counted are read."""
        lazy = sum(batch.lazy)
        self._stats.not_loaded -= lazy
        self._stats.loaded_after_all += lazy

    def judgement(self) -> tuple[bool, str] | None:
        """Return whether it pays, and the numbers in words; once, as soon as there are enough."""
        if self._judged or min(len(self._hit_seconds), len(self._miss_seconds)) < COMPARED_STEPS:
            return None
        self._judged = True
        hit, miss = self._hit(), self._miss()
        return hit < miss, f"a sample takes {hit * 1e3:.3f} ms from the cache and {miss * 1e3:.3f} ms without"

    def _hit(self) -> float:
        return statistics.median(self._hit_seconds)

    def _miss(self) -> float:
        return statistics.median(self._miss_seconds)


class Habits:
    """Counts what the program did with its last batches.

    Attributes:
        reader: who reads the input in most batches; None if nobody does.
    """

    def __init__(self) -> None:
        self.reader: str | None = None
        self._strange = self._other = self._shaped = 0
        self._begin()

    def _begin(self) -> None:
        self._lazy = self._touches = self._reruns = 0
        self._read = 0  # number of the layer module whose output was asked for last
        self._toucher: str | None = None

    def why_stop(self, batch: CachedBatch, front: Front) -> str | None:
        """Count a batch that is over; return why the cache is of no use, or None."""
        served = batch.hits + batch.advanced > 0
        had_rows = any(read.future.done() and not read.future.cancelled() for read in batch.reads)
        self._strange = 0 if served else self._strange + had_rows
        self._shaped = self._shaped + (batch.other_shape is not None) if self._strange else 0
        self._other = 0 if batch.matches else self._other + had_rows
        if self._other >= OTHER:
            return f"the last {OTHER} batches called the frozen layers in another way than before, or not at all"
        if self._strange >= STRANGE:
            if 2 * self._shaped > STRANGE:
                return f"most of the last {STRANGE} batches had other shapes than the entries"
            differed = f"the inputs of the last {STRANGE} batches differed from those of the entries"
            return f"{differed} (random, mixed, or sorted by the collate function?)"
        return self._count_lazy(batch, front)

    def touched(self, batch: CachedBatch) -> None:
        """Count a batch whose inputs were read, perhaps after its end."""
        self._touches, self._toucher = self._touches + 1, batch.was_touched

    def _count_lazy(self, batch: CachedBatch, front: Front) -> str | None:
        ran, front.ran = front.ran, set()
        if not any(batch.lazy) or batch.plan.checks:  # a check runs layers by itself
            return None
        self._lazy += 1
        if batch.was_touched is not None:
            self.touched(batch)
        if batch.hits == batch.samples and ran:
            self._reruns, self._read = self._reruns + 1, max(ran)
        if self._lazy < COUNTED:
            return None
        reruns, touches, read, toucher = self._reruns, self._touches, self._read, self._toucher
        self._begin()
        if 2 * reruns > COUNTED:
            return f"something reads the output of {front.units[read].path!r} in most batches"
        self.reader = toucher if 2 * touches > COUNTED else None
        return None
