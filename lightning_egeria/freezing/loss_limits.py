"""How deep pre-trained weights may freeze, by the loss that you accept: read off the curves in the method card."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LossLimits:
    """Limits that lost at most so much on every fine-tuning task of the proof, as a mean of its seeds.

    Attributes:
        points: the loss, in points of the metric.
        weights: share of the chain's weights that may freeze without a trial, tables of embeddings not counted.
        layers: share of the layer modules that may freeze without a trial, tables not counted.
        before_untrained: the same in front of an untrained part, such as a decoder.
        progress: share of the next depth's steps at which a trial stays deeper; 0: there is no trial.
    """

    points: float
    weights: float
    layers: float
    before_untrained: float
    progress: float


LIMITS = (
    LossLimits(points=0, weights=1 / 4, layers=1 / 2, before_untrained=0, progress=0.95),
    LossLimits(points=1, weights=1 / 3, layers=1 / 2, before_untrained=0, progress=0.95),
    LossLimits(points=2, weights=1 / 2, layers=1 / 2, before_untrained=1 / 2, progress=0.9),
    LossLimits(points=5, weights=2 / 3, layers=3 / 4, before_untrained=3 / 4, progress=0.8),
    LossLimits(points=12, weights=1, layers=1, before_untrained=1, progress=0),
)


def limits_of(max_loss_points: float) -> LossLimits:
    """Return the widest limits that lost at most so much.

    Args:
        max_loss_points: accepted loss, in points; at least 0.

    >>> [limits_of(points).points for points in (0, 1.5, 2, float("inf"))]
    [0, 1, 2, 12]
    """
    return next(limits for limits in reversed(LIMITS) if limits.points <= max_loss_points)


def untried_depth(
    weights: Sequence[int], max_depth: int, tables: int, limits: LossLimits, before_untrained: bool = False
) -> int:
    """Return the depth where no depth can be tried. Tables in front freeze with any layer module, and alone.

    Args:
        weights: number of weights of each layer module, front to back.
        max_depth: how many layer modules may freeze.
        tables: how many at the front only look up vectors, which costs next to nothing.
        limits: what the user accepts.
        before_untrained: whether a part behind the trained weights is untrained.

    >>> default, *_, fastest = LIMITS
    >>> transformer = [900, 100, 50, 50, 50, 50, 50, 50]
    >>> untried_depth(transformer, 7, 2, default), untried_depth(transformer, 7, 2, fastest)
    (3, 7)
    >>> untried_depth([1, 2, 4, 8, 16, 32], 5, 0, default), untried_depth([1, 2, 4, 8, 16, 32], 5, 0, default, True)
    (3, 0)
    """
    behind = weights[tables:]
    depth = int((limits.before_untrained if before_untrained else limits.layers) * len(behind))
    most = limits.weights * sum(behind) * (1 + 1e-9)  # a third of six equal layers is two
    while depth and sum(behind[:depth]) > most:
        depth -= 1
    return min(tables + depth, max_depth)
