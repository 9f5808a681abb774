"""What the cache has done, and whether it pays."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque

import torch

from lightning_egeria.caching.levels import Level
from lightning_egeria.caching.steps import Step
from lightning_egeria.profiling.clock import seconds_between

COMPARED_STEPS = 12  # of each kind, before it is decided whether the cache pays


@dataclasses.dataclass
class CacheStats:
    """What the cache has done.

    Attributes:
        hits: samples whose frozen layers were left out.
        advanced: samples that came from a shallower boundary and ran only the layers that froze since.
        misses: samples that ran all of the frozen layers since the cache is on.
        not_loaded: samples that were not even loaded.
        to_write: entries that were handed on to be written, in the background.
        written: entries written.
        wrong: entries that were found to be damaged or outdated.
        bytes_on_disk: of the stores of this run.
        seconds_saved: estimate: hits times what a sample's miss took longer than its hit; negative where it lost.
        cut: depth of the boundary that is cached; 0: none.
        off: why the cache is off; None while it is on.
    """

    hits: int = 0
    advanced: int = 0
    misses: int = 0
    not_loaded: int = 0
    to_write: int = 0
    written: int = 0
    wrong: int = 0
    bytes_on_disk: int = 0
    seconds_saved: float = 0.0
    cut: int = 0
    off: str | None = "nothing is frozen"


class Accounts:
    """Counts samples, and compares the time of steps from the cache with that of steps that had nothing from it.

    The time of a step is what training waits for its batch, and from the call of the network to the boundary.
    """

    def __init__(self, stats: CacheStats) -> None:
        self._stats = stats
        self._hit_seconds: deque[float] = deque(maxlen=50)
        self._miss_seconds: deque[float] = deque(maxlen=50)
        self._told = False

    def restart(self) -> None:
        """Another boundary is cached."""
        self._hit_seconds.clear()
        self._miss_seconds.clear()
        self._told = False

    def count(self, step: Step, newest: Level | None) -> None:
        """Add a step that is over."""
        used = [] if step.full else step.rows
        hits = sum(len(read.places) for read, _ in used if read.level is newest)
        advanced = sum(len(read.places) for read, _ in used) - hits
        self._stats.hits += hits
        self._stats.advanced += advanced
        self._stats.misses += step.samples - hits - advanced
        if step.began is None or step.ended is None:
            return
        if isinstance(step.ended, torch.cuda.Event):
            step.ended.synchronize()
        seconds = (step.waited + seconds_between(step.began, step.ended)) / step.samples
        if hits == step.samples:
            self._hit_seconds.append(seconds)
        elif hits + advanced == 0 and step.all_loaded:
            self._miss_seconds.append(seconds - step.digest_seconds / step.samples)  # which it takes for the cache only
        if self._hit_seconds and self._miss_seconds and hits:
            self._stats.seconds_saved += hits * (self._miss() - self._hit())

    def judgement(self) -> tuple[bool, str] | None:
        """Whether it pays, and the numbers in words; once, as soon as there are enough."""
        if self._told or min(len(self._hit_seconds), len(self._miss_seconds)) < COMPARED_STEPS:
            return None
        self._told = True
        hit, miss = self._hit(), self._miss()
        return hit < miss, f"a sample takes {hit * 1e3:.3f} ms from the cache and {miss * 1e3:.3f} ms without"

    def _hit(self) -> float:
        return statistics.median(self._hit_seconds)

    def _miss(self) -> float:
        return statistics.median(self._miss_seconds)
