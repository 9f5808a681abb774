"""What the cache has done, whether it pays, and whether the program lets it."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from lightning_egeria.caching import policy
from lightning_egeria.core.profiling.race import Race

if TYPE_CHECKING:
    from lightning_egeria.caching.serve import CachedBatch


NOTHING_FROZEN = "nothing is frozen"


@dataclasses.dataclass
class CacheStats:
    """What the cache has done in training, or in validation.

    Attributes:
        hits: samples whose cached values all came from entries.
        advanced: samples for which modules ran on a cached value from an entry: frozen later, or cheap.
        misses: samples that ran through frozen modules from the start.
        unused: samples whose entries were read, and were not for what the frozen modules were called with.
        not_loaded: samples that were not loaded.
        loaded_after_all: samples that the program read although the cache had not loaded them.
        to_write: entries that were handed to the writing thread.
        written: entries written.
        wrong: entries that were damaged or outdated.
        bytes_on_disk: size of the stores of this run.
        seconds_saved: what frozen modules and, in this process, the dataset would have taken for samples from the
            cache, less all that the cache did: beginning, probes, planning, digests, writing, reading, verification,
            and samples loaded after all. It is rather too low than too high: what other processes did not have to load
            does not count. Below 0 if the cache has cost time.
        values: number of cached values.
        not_kept: why a value that the program asks for is not kept; empty if all are.
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
    values: int = 0
    not_kept: str = ""
    off: str | None = NOTHING_FROZEN


_SAVED = threading.Lock()


def add_saved(stats: CacheStats, seconds: float) -> None:
    """Add seconds to those that the cache has saved, or take some off; in any thread."""
    with _SAVED:
        stats.seconds_saved += seconds


@contextlib.contextmanager
def spending(stats: CacheStats, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """While the cache does what training would not do without it."""
    started = clock()
    try:
        yield
    finally:
        add_saved(stats, started - clock())


class Accounts:
    """Counts samples, and compares the time of cached batches with the time of others.

    To decide whether the cache pays, the time of a batch is the wait for it, and the time to serve or compute what the
    program asks of frozen modules; in a batch that is served also what the cache does around the step, and in one that
    is computed without what writing entries takes. If that does not decide, whole steps are compared.

    What a batch has saved is what frozen modules and the dataset take for its samples, less all that was measured of
    the batch.

    Attributes:
        race: of whole steps.
        loads_ahead: whether the loader loads batches before they are asked for.
    """

    def __init__(self, stats: CacheStats) -> None:
        self.loads_ahead = False
        self._stats = stats
        self._hits: deque[float] = deque(maxlen=50)  # seconds for a sample
        self._misses: deque[float] = deque(maxlen=50)
        self._miss_waits: deque[float] = deque(maxlen=50)
        self._running: deque[float] = deque(maxlen=50)  # of frozen modules alone
        self._loading: deque[float] = deque(maxlen=50)  # of the dataset alone
        self.restart()

    def restart(self) -> None:
        """Other values are cached."""
        for known in (self._hits, self._misses, self._miss_waits, self._running, self._loading):
            known.clear()
        self._gain: float | None = None  # seconds that a step saves for each sample from the cache
        self._served = 0  # samples of batches from the cache
        self._estimate = 0.0  # seconds that they seemed to save before that was known
        self._samples = 1  # of the last batch from the cache
        self._judged = False
        self.race_again()

    def race_again(self) -> None:
        """Steps with the cache have become others."""
        self.race, self._has_raced = Race(), False

    def count(self, batch: CachedBatch) -> None:
        """Add a batch that is over."""
        stats, samples = self._stats, batch.samples
        ran, advanced = int(batch.ran.sum()), int(batch.advanced.sum())
        kept = batch.matches > 0
        saved = self._saved(batch)
        if not any(batch.lazy) and not (batch.demands and kept and (ran < samples or advanced)):
            saved = min(0.0, saved)  # one that runs faster than others has saved nothing
        add_saved(stats, saved)
        if not batch.demands:
            return
        stats.hits += samples - ran if kept else 0
        stats.advanced += advanced if kept else 0
        stats.misses += ran - advanced if kept else samples
        stats.unused += batch.rejected
        lazy = sum(batch.lazy)
        stats.not_loaded += 0 if batch.was_touched else lazy
        stats.loaded_after_all += lazy if batch.was_touched else 0
        if not batch.is_timed or batch.eager:
            return
        seconds = batch.waited + batch.seconds
        # Entries that were read and did not fit are the cache's work, too; rows that have none yet are not.
        whole = [len(read.places) == samples for read in batch.reads]
        is_served = kept and (not ran or (any(whole) if ran == advanced else bool(whole) and all(whole)))
        if is_served:
            self._hits.append((seconds + batch.around) / samples)
            self._samples = samples
            self._served += samples
            self.race.served()
        elif ran == samples and not advanced:
            self._misses.append((seconds - batch.recording) / samples)
            self._miss_waits.append(batch.waited)
        if is_served and self._gain is not None:
            add_saved(stats, samples * self._gain - saved)
        elif is_served:
            self._estimate += saved

    def _saved(self, batch: CachedBatch) -> float:
        """Return what a batch has saved, as far as it was measured; below 0 if it has cost time."""
        samples, loaded = batch.samples, batch.loaded
        spent = policy.SERVE_BATCH_S + batch.seconds + batch.around
        if bool(batch.ran.all()) and not batch.advanced.any():  # a GPU is waited for at the end of each demand only
            self._running.append((batch.running or max(0.0, batch.seconds - batch.recording)) / samples)
            plain = self._running[-1] * samples
        else:
            plain = statistics.median_low(self._running) * samples if self._running else batch.running
        loading = loaded.loading
        if not any(batch.lazy):
            self._loading.append(loading / samples)
        elif self._loading:
            loading = statistics.median_low(self._loading) * samples
        if self.loads_ahead:  # training may not have waited for it, so what other processes save does not count
            return plain - spent + min(0.0, loading - loaded.took)
        return plain - spent + loading - batch.waited

    def touched_late(self, batch: CachedBatch) -> None:
        """The inputs of a batch that was counted are read."""
        lazy = sum(batch.lazy)
        self._stats.not_loaded -= lazy
        self._stats.loaded_after_all += lazy

    def judgement(self, device: torch.device, batches: int | None) -> tuple[bool, str] | None:
        """Return whether it pays, and the numbers in words; once, as soon as there are enough.

        Args:
            device: that trains.
            batches: that are left of the run; None if that is not known.
        """
        enough = policy.COMPARED_BATCHES
        if self._judged or len(self._hits) < enough or self.race.is_on:
            return None
        if self._has_raced:
            return self._after_race()
        if not self._misses:
            return None
        # Batches of which some rows have no entry take as long as others, so the mean counts.
        hit, miss = statistics.fmean(self._hits), statistics.median(self._misses)
        verdict = policy.pays(hit, miss, batches, self._samples)
        if verdict is not None:
            self._judged = True
            text = f"a sample takes {hit * 1e3:.3f} ms from the cache and {miss * 1e3:.3f} ms without"
            return None if verdict else (False, text)
        self._has_raced = True
        self.race.begin(device)
        return None

    def _after_race(self) -> tuple[bool, str] | None:
        waits = self.loads_ahead and len(self._miss_waits) > 0
        steps = self.race.seconds(statistics.median(self._miss_waits) if waits else 0.0)
        self._judged = True
        if steps is None:
            return None
        cached, plain = steps
        self._gain = (plain - cached) / self._samples
        add_saved(self._stats, self._gain * self._served - self._estimate)
        return cached < plain, f"a step takes {cached * 1e3:.1f} ms with it and {plain * 1e3:.1f} ms without"


class Habits:
    """Counts what the program did with its last batches.

    Attributes:
        reader: what reads the input in most batches; None if nothing does.
    """

    def __init__(self) -> None:
        self.reader: str | None = None
        self._other = self._batches = 0
        self._sizes: set[frozenset[tuple[int, ...]]] = set()
        self._served: deque[float] = deque(maxlen=policy.STRANGE)  # shares of the samples with entries
        self._begin()

    def _begin(self) -> None:
        self._counted = self._touches = 0
        self._toucher: str | None = None

    def why_stop(self, batch: CachedBatch, is_random: bool, come_in_sizes: bool) -> str | None:
        """Count a batch that is over; return why the cache is of no use, or None.

        Args:
            batch: it.
            is_random: whether its samples come together by chance.
            come_in_sizes: whether values are kept for inputs of several sizes.
        """
        had_rows = any(read.future.done() and not read.future.cancelled() for read in batch.reads)
        if had_rows:
            share = float((~batch.ran | batch.advanced).sum()) / max(1, _with_entries(batch))
            self._served.append(share if batch.matches else 0.0)
        self._other = 0 if batch.matches else self._other + had_rows
        if self._other >= policy.OTHER and not come_in_sizes:
            text = "called the frozen layers in another way than before (mixed at random?), or not at all"
            return f"the last {policy.OTHER} batches {text}"
        if len(self._served) == policy.STRANGE and sum(self._served) < policy.LEAST_SERVED * policy.STRANGE:
            differed = f"nearly all inputs of the last {policy.STRANGE} batches differed from those of the entries"
            return f"{differed} (random, mixed, or sorted by the collate function?)"
        self._batches += 1
        if is_random and batch.sizes is not None:
            self._sizes.add(batch.sizes)
        if policy.are_many_sizes(self._batches, len(self._sizes)):
            return policy.PADDED
        self._count_lazy(batch)
        return None

    def touched(self, batch: CachedBatch) -> None:
        """Count a batch whose inputs were read, perhaps after its end."""
        self._touches, self._toucher = self._touches + 1, batch.was_touched

    def _count_lazy(self, batch: CachedBatch) -> None:
        if batch.plan.checks or not any(batch.lazy):  # a check runs frozen modules by itself
            return
        self._counted += 1
        if batch.was_touched is not None:
            self.touched(batch)
        if self._counted < policy.COUNTED:
            return
        touches, toucher = self._touches, self._toucher
        self._begin()
        self.reader = toucher if 2 * touches > policy.COUNTED else None


def _with_entries(batch: CachedBatch) -> int:
    """Number of its samples whose entries are read."""
    places = [read.places for read in batch.reads]
    if len(places) == 1:
        return len(places[0])
    return len(np.unique(np.concatenate(places))) if places else 0
