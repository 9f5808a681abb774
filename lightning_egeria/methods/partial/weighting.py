"""Shorter suffixes for slow ranks, from the measured phases of their steps."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence

from lightning_egeria.methods.partial.plans import SuffixPlan, ranks_of_share

WARM_UP_BATCHES = 3  # while allocators and caches settle
WHOLE_MEASURED, LATEST_MEASURED = 20, 10  # batches that a median is over
EQUAL = 0.05  # share of a step by which a rank may be slower and still count as equally fast


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """Seconds of a batch on one rank.

    Attributes:
        forward: of the forward.
        backward: of the backward by depth: of the whole one, of that without the first layer module, and so on.
    """

    forward: float
    backward: tuple[float, ...]

    def seconds(self, depth: int) -> float:
        """Return the seconds of a batch without the backward of the first ``depth`` layer modules."""
        return self.forward + self.backward[depth]


def balanced_depths(times: Sequence[RankTimes], min_share: float) -> tuple[int, ...]:
    """Return for each rank the smallest depth with which it is no slower than the others with whole steps.

    A rank that is slower by `EQUAL` at most keeps its whole steps. The others are the faster half of the ranks, or
    ``min_share`` of them if that is more. They have whole steps, so each layer module has as many contributors.

    Args:
        times: of each rank.
        min_share: share of the ranks that compute the gradient of each layer module, at least; in (0, 1].

    >>> fast, slow = RankTimes(1.0, (2.0, 1.5, 1.0, 0.5)), RankTimes(1.5, (3.0, 2.25, 1.5, 0.75))
    >>> balanced_depths([fast, slow], min_share=0.25)
    (0, 2)
    >>> balanced_depths([fast, slow], min_share=1)
    (0, 0)
    """
    whole = sorted(one.seconds(0) for one in times)
    place = max(ranks_of_share(len(times), min_share), (len(times) + 1) // 2) - 1
    limit = whole[place]
    return tuple(
        0
        if one.seconds(0) <= (1 + EQUAL) * limit
        else next((depth for depth in range(len(one.backward)) if one.seconds(depth) <= limit), len(one.backward) - 1)
        for one in times
    )


class WeightedPlan(SuffixPlan):
    """Whole steps until the ranks are timed, then shorter suffixes for slow ranks.

    Args:
        ranks: number of ranks.
        min_share: share of the ranks that compute the gradient of each layer module, at least; in (0, 1].
        layer_modules: length of the chain.

    Attributes:
        depths: number of layer modules in front of each rank's suffix; change it between two steps, on all ranks.
    """

    def __init__(self, ranks: int, min_share: float, layer_modules: int) -> None:
        self.min_share = min_share
        self.depths: tuple[int, ...] = (0,) * ranks
        self._layer_modules = layer_modules

    def lengths(self, step: int, layer_modules: int) -> tuple[int, ...]:
        """Return the suffixes behind ``depths``."""
        return tuple(min(layer_modules, self._layer_modules - depth) for depth in self.depths)

    def pauses(self, layer_modules: int) -> bool:
        """Whether a rank may have less than the whole chain."""
        return ranks_of_share(len(self.depths), self.min_share) < len(self.depths)

    def balance(self, times: Sequence[RankTimes]) -> bool:
        """Choose the depths for these times; return whether they changed."""
        before, self.depths = self.depths, balanced_depths(times, self.min_share)
        return self.depths != before


class SuffixTimes:
    """What batches of different suffixes take on this rank.

    Args:
        depths: number of depths: one more than the largest.

    >>> times = SuffixTimes(depths=2)
    >>> for batch in range(5):
    ...     times.add(0, forward=1.0, backward=[2.0, 1.5])
    >>> times.estimate()
    RankTimes(forward=1.0, backward=(2.0, 1.5))
    >>> for batch in range(8):  # it became slower, and shows only the end of its backward
    ...     times.add(1, forward=2.0, backward=[None, 3.0])
    >>> times.estimate()
    RankTimes(forward=2.0, backward=(4.0, 3.0))
    """

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._warming_up = WARM_UP_BATCHES
        self._whole: deque[list[float]] = deque(maxlen=WHOLE_MEASURED)
        self._latest: deque[tuple[int, float, float]] = deque(maxlen=LATEST_MEASURED)  # depth, forward, backward

    def add(self, depth: int, forward: float, backward: Sequence[float | None]) -> None:
        """Add a batch.

        Args:
            depth: number of layer modules in front of its suffix.
            forward: seconds of the forward.
            backward: seconds of the backward down to each layer module, front to back; None in front of the suffix.
        """
        known = [seconds for seconds in backward[: self._depths] if seconds is not None]
        if self._warming_up:
            self._warming_up -= 1
            return
        if len(known) == self._depths:
            self._whole.append(known)
        if depth < self._depths and (own := backward[depth]) is not None:
            self._latest.append((depth, forward, own))

    @property
    def full(self) -> bool:
        """Whether there are enough whole batches for good medians."""
        return len(self._whole) == WHOLE_MEASURED

    def curve(self) -> tuple[float, ...] | None:
        """Return the seconds of a backward by depth, from whole batches; None before there is one."""
        if not self._whole:
            return None
        return tuple(statistics.median(column) for column in zip(*self._whole, strict=True))

    def shares(self) -> tuple[float, ...] | None:
        """Return the share of a backward that is left at each depth; None before it is measured."""
        curve = self.curve()
        return tuple(seconds / curve[0] for seconds in curve) if curve is not None and curve[0] > 0 else None

    def estimate(self) -> RankTimes | None:
        """Return what a batch takes now at each depth; None before it is measured.

        The latest batches show how fast the rank is now, and whole ones how a backward divides over the layer modules.
        """
        curve = self.curve()
        if curve is None or not self._latest or min(curve) <= 0:
            return None
        forward = statistics.median(seconds for _, seconds, _ in self._latest)
        slowness = statistics.median(seconds / curve[depth] for depth, _, seconds in self._latest)
        return RankTimes(forward, tuple(slowness * seconds for seconds in curve))


def packed(times: RankTimes | None, depths: int) -> list[float]:
    """Return times as numbers to send; NaN where nothing is measured."""
    return [times.forward, *times.backward] if times is not None else [math.nan] * (depths + 1)


def unpacked(numbers: Sequence[Sequence[float]]) -> list[RankTimes] | None:
    """Return the times of all ranks from their numbers; None if a rank has none.

    >>> unpacked([packed(RankTimes(1.0, (2.0, 1.0)), 2), packed(None, 2)])
    """
    if not all(math.isfinite(number) for row in numbers for number in row):
        return None
    return [RankTimes(row[0], tuple(row[1:])) for row in numbers]
