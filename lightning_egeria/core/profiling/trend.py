"""Plasticity over time: a moving average, and the slope of a line through its last values."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any


def least_squares_slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through ``values`` at x = 0, 1, 2, ...

    In closed form: ``sum((x - mean(x)) * (y - mean(y))) / sum((x - mean(x))^2)``.

    Args:
        values: at least two numbers.

    Returns:
        Change of the line per value.

    Raises:
        ValueError: if there are fewer than two values.

    >>> least_squares_slope([1.0, 3.0, 5.0])
    2.0
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"a slope needs at least two values, got {n}")
    center, mean = (n - 1) / 2, sum(values) / n
    spread = n * (n * n - 1) / 12
    return sum((x - center) * (y - mean) for x, y in enumerate(values)) / spread


class PlasticitySeries:
    """Plasticity of one layer module: the raw values of a window, their moving average, and its slope.

    Each refresh of the reference resets the raw values, which makes them a saw-tooth. A window as long as the interval
    between two refreshes averages over every age of the reference once, which cancels the saw-tooth.

    >>> series = PlasticitySeries(window_evaluations=2)
    >>> [series.append(value) for value in (4.0, 2.0, 1.0)]
    [None, None, -1.5]
    >>> series.smoothed
    1.5
    """

    def __init__(self, window_evaluations: int) -> None:
        self._raw: deque[float] = deque(maxlen=window_evaluations)
        self._averages: deque[float] = deque(maxlen=window_evaluations)

    @property
    def smoothed(self) -> float | None:
        """Latest moving average; None until the first window is full."""
        return self._averages[-1] if self._averages else None

    def append(self, value: float) -> float | None:
        """Add one raw value; return the slope per evaluation, or None until the window of averages is full."""
        self._raw.append(value)
        if len(self._raw) == self._raw.maxlen:
            self._averages.append(sum(self._raw) / len(self._raw))
        if len(self._averages) < (self._averages.maxlen or 0):
            return None
        return least_squares_slope(self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {"raw": list(self._raw), "averages": list(self._averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._raw = deque(state["raw"], maxlen=self._raw.maxlen)
        self._averages = deque(state["averages"], maxlen=self._averages.maxlen)
