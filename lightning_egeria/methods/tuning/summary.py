"""How fast a branch trains: the summary of its loss trace."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Sequence

WINDOWS = 10
ROUNDING = 1e-6  # of the first window: a smaller change of the loss is not progress
STABLE_NOISE = 0.1  # share of the range that a converging branch may rise between two windows
DIVERGED_FACTOR = 10.0


class Label(enum.Enum):
    """What a loss trace shows."""

    CONVERGING = "converging"
    UNSTABLE = "unstable"
    DIVERGED = "diverged"
    FAILED = "failed"  # the branch could not train at all, as without the memory for its batch size


@dataclasses.dataclass(frozen=True)
class Summary:
    """The loss trace of a branch in a few numbers.

    Attributes:
        range: mean of the last window minus mean of the first; negative where the loss falls.
        noise: largest rise from one window to the next; 0 where the loss never rises.
        gain: loss that the branch gains; may be negative.
        speed: its gain in a unit of cost; at least 0.
        label: what the trace shows.
    """

    range: float
    noise: float
    gain: float
    speed: float
    label: Label


def summarize(losses: Sequence[float], cost: float, start: float | None = None, windows: int = WINDOWS) -> Summary:
    """Summarise the losses of a branch as MLtuner does (Cui et al., arXiv:1803.07445).

    With window means ``w_1 .. w_K``, ``range = w_K - w_1``, ``noise = max(0, max(w_{k+1} - w_k))`` and
    ``speed = max(0, -(range + noise) / cost)``, where a gain within rounding is none. The trace converges if it falls
    and ``noise <= 0.1 |range|``. It has diverged if a loss is not finite, or a window mean exceeds 10 times a positive
    first one. Where losses are relative to those without learning, batches do not differ, and no noise is taken off.

    Args:
        losses: loss of each batch, in order; at least one.
        cost: what the branch took, in steps or in seconds; positive.
        start: loss without learning that ``losses`` are relative to, as a window in front of the first; None if they
            are not. Without it, a loss that explodes in its first window and falls from there looks like progress.
        windows: most windows. A shorter trace has one for each loss.

    >>> summarize([5.0, 4.0, 3.0, 2.0], cost=4)
    Summary(range=-3.0, noise=0.0, gain=3.0, speed=0.75, label=<Label.CONVERGING: 'converging'>)
    >>> summarize([2.0, 3.0, 1.0], cost=3).label, summarize([1.0, math.nan], cost=2).label
    (<Label.UNSTABLE: 'unstable'>, <Label.DIVERGED: 'diverged'>)
    """
    if not losses or not all(map(math.isfinite, losses)):
        return Summary(math.nan, math.nan, -math.inf, 0.0, Label.DIVERGED)
    means = [*([start] if start is not None else []), *window_means(losses, windows)]
    change = means[-1] - means[0]
    noise = max([0.0, *(after - before for before, after in itertools.pairwise(means))])
    gain = -change - (noise if start is None else 0.0)
    progress = gain > ROUNDING * abs(means[0])
    speed = gain / cost if progress else 0.0
    if means[0] > 0 and max(means) > DIVERGED_FACTOR * means[0]:
        return Summary(change, noise, gain, 0.0, Label.DIVERGED)
    converges = progress and noise <= STABLE_NOISE * -change
    return Summary(change, noise, gain, speed, Label.CONVERGING if converges else Label.UNSTABLE)


def window_means(losses: Sequence[float], windows: int = WINDOWS) -> list[float]:
    """Return the mean of each window; windows differ by one loss in length at most.

    >>> window_means([1.0, 2.0, 3.0, 4.0, 5.0], windows=2)
    [1.5, 4.0]
    """
    count = min(windows, len(losses))
    edges = [len(losses) * number // count for number in range(count + 1)]
    return [math.fsum(losses[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
