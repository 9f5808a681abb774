"""What the cache has done, whether it pays, and whether the program lets it."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterator

import torch

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front
from lightning_egeria.profiling.clock import seconds_between, wait_for
from lightning_egeria.profiling.race import Race

COMPARED_STEPS = 12  # of each kind, before it is decided whether the cache pays
RACES = 3  # that may have too few of them
COUNTED = 20  # lazy batches, before it is decided whether inputs are left out and where the boundary is
OTHER = 6  # batches in a row that call the frozen layers in another way, before the cache stops
STRANGE = 20  # batches, before the cache stops because it serves too few samples
LEAST_SERVED = 0.05  # share of the samples with entries


@dataclasses.dataclass
class CacheStats:
    """What the cache has done in training, or in validation.

    Attributes:
        hits: samples whose frozen layers did not run.
        advanced: samples that came from a shallower boundary and ran only the layers that froze since.
        misses: samples that ran all frozen layers.
        unused: those of them whose entries were read, and were not for what the frozen layers were called with.
        not_loaded: samples that were not loaded.
        loaded_after_all: samples that the program read although the cache had not loaded them.
        to_write: entries that were handed to the writing thread.
        written: entries written.
        wrong: entries that were damaged or outdated.
        bytes_on_disk: size of the stores of this run.
        seconds_saved: estimate: what hits saved over misses, less the time of trials and of samples loaded after all.
        depth: depth of the cached boundary; 0 if there is none.
        off: why the cache is off; None while it is on.
    """

    hits: int = 0
    advanced: int = 0
    misses: int = 0
    unused: int = 0
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

    The time of a batch is the wait for it, and the time from the call of the network to the boundary. If that is less
    from the cache, whole steps are compared.

    Attributes:
        race: of whole steps.
        loads_ahead: whether the loader loads batches before they are asked for.
    """

    def __init__(self, stats: CacheStats) -> None:
        self.loads_ahead = False
        self._stats = stats
        self._hit_seconds: deque[float] = deque(maxlen=50)
        self._miss_seconds: deque[float] = deque(maxlen=50)
        self._miss_waits: deque[float] = deque(maxlen=50)
        self.restart()

    def restart(self) -> None:
        """Another boundary is cached."""
        self._hit_seconds.clear()
        self._miss_seconds.clear()
        self._miss_waits.clear()
        self._gain: float | None = None  # seconds that a step saves for each sample of a batch from the cache
        self._served = 0  # samples of batches from the cache
        self._estimate = 0.0  # seconds that they seemed to save before that was known
        self._samples = 1  # of the last batch from the cache
        self._judged = False
        self.race_again()

    def race_again(self) -> None:
        """Steps with the cache have become others."""
        self._races, self.race = 0, Race()

    def count(self, batch: CachedBatch) -> None:
        """Add a batch that is over."""
        stats, samples, entries = self._stats, batch.samples, _with_entries(batch)
        stats.hits += batch.hits
        stats.advanced += batch.advanced
        stats.misses += samples - batch.hits - batch.advanced
        stats.unused += max(0, entries - batch.hits - batch.advanced)
        lazy = sum(batch.lazy)
        stats.not_loaded += 0 if batch.was_touched else lazy
        stats.loaded_after_all += lazy if batch.was_touched else 0
        if batch.began is None or batch.ended is None or not batch.is_timed:
            return
        wait_for(batch.ended)
        seconds = (batch.waited + seconds_between(batch.began, batch.ended)) / samples
        # Entries that were read and did not fit are the cache's work, too.
        is_served = batch.hits == samples or (entries == samples and not batch.advanced)
        if is_served:
            self._hit_seconds.append(seconds)
            self._samples = samples
            self.race.served()
        elif not batch.hits and not batch.advanced and not batch.eager:
            self._miss_seconds.append(seconds)
            self._miss_waits.append(batch.waited)
        served = samples if is_served else batch.hits
        self._served += served
        if self._gain is not None:
            stats.seconds_saved += served * self._gain
        elif served and self._hit_seconds and self._miss_seconds:
            estimate = served * (self._miss() - self._hit())
            self._estimate, stats.seconds_saved = self._estimate + estimate, stats.seconds_saved + estimate

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """While the cache does what training would not do without it."""
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

    def judgement(self, device: torch.device) -> tuple[bool, str] | None:
        """Return whether it pays, and the numbers in words; once, as soon as there are enough.

        Args:
            device: that trains.
        """
        if self._judged or len(self._hit_seconds) < COMPARED_STEPS or self.race.is_on:
            return None
        waits = self.loads_ahead and len(self._miss_waits) > 0
        steps = self.race.seconds(statistics.median(self._miss_waits) if waits else 0.0)
        slow = len(self._miss_seconds) >= COMPARED_STEPS and self._hit() >= self._miss()
        if steps is None and not slow and self._races < RACES:
            self._races, self.race = self._races + 1, Race()
            self.race.begin(device)
            return None
        self._judged = True
        if steps is None and len(self._miss_seconds) < COMPARED_STEPS:
            return None
        if steps is None:
            per_sample = f"a sample takes {self._hit() * 1e3:.3f} ms from the cache"
            return not slow, f"{per_sample} and {self._miss() * 1e3:.3f} ms without"
        cached, plain = steps
        self._gain = (plain - cached) / self._samples
        self._stats.seconds_saved += self._gain * self._served - self._estimate
        return cached < plain, f"a step takes {cached * 1e3:.1f} ms with it and {plain * 1e3:.1f} ms without"

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
        self._other = 0
        self._served: deque[float] = deque(maxlen=STRANGE)  # shares of the samples with entries
        self._shaped: deque[bool] = deque(maxlen=STRANGE)
        self._begin()

    def _begin(self) -> None:
        self._counted = self._touches = self._reruns = 0
        self._read = 0  # number of the layer module whose output was asked for last
        self._toucher: str | None = None

    def why_stop(self, batch: CachedBatch, front: Front) -> str | None:
        """Count a batch that is over; return why the cache is of no use, or None."""
        had_rows = any(read.future.done() and not read.future.cancelled() for read in batch.reads)
        if had_rows:
            self._served.append((batch.hits + batch.advanced) / max(1, _with_entries(batch)))
            self._shaped.append(batch.other_shape is not None)
        self._other = 0 if batch.matches else self._other + had_rows
        if self._other >= OTHER:
            text = "called the frozen layers in another way than before (mixed at random?), or not at all"
            return f"the last {OTHER} batches {text}"
        if len(self._served) == STRANGE and sum(self._served) < LEAST_SERVED * STRANGE:
            if 2 * sum(self._shaped) > STRANGE:
                return f"most of the last {STRANGE} batches had other shapes than the entries"
            differed = f"nearly all inputs of the last {STRANGE} batches differed from those of the entries"
            return f"{differed} (random, mixed, or sorted by the collate function?)"
        return self._count_lazy(batch, front)

    def touched(self, batch: CachedBatch) -> None:
        """Count a batch whose inputs were read, perhaps after its end."""
        self._touches, self._toucher = self._touches + 1, batch.was_touched

    def _count_lazy(self, batch: CachedBatch, front: Front) -> str | None:
        ran, front.ran = front.ran, set()
        is_lazy = any(batch.lazy)
        if batch.plan.checks or not (is_lazy or batch.hits == batch.samples):  # a check runs layers by itself
            return None
        self._counted += 1
        if is_lazy and batch.was_touched is not None:
            self.touched(batch)
        if batch.hits == batch.samples and ran:
            self._reruns, self._read = self._reruns + 1, max(ran)
        if self._counted < COUNTED:
            return None
        reruns, touches, read, toucher = self._reruns, self._touches, self._read, self._toucher
        self._begin()
        if 2 * reruns > COUNTED:
            return f"something reads the output of {front.units[read].path!r} in most batches"
        self.reader = toucher if 2 * touches > COUNTED else None
        return None


def _with_entries(batch: CachedBatch) -> int:
    """Number of its samples whose entries are read."""
    return sum(len(read.places) for read in batch.reads)
