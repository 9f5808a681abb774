"""How batch size and gradient noise went over a run, for pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_egeria.methods.goodput.decision import Division
from lightning_egeria.methods.goodput.noise import GradientNoise

MOST = 1000  # points; beyond them, every second one is left out


@dataclasses.dataclass(frozen=True)
class Moment:
    """One moment of a run.

    Attributes:
        step: number of optimizer steps so far.
        division: the batch size from then on.
        squared_norm: of the true gradient, as estimated.
        variance: of the gradient at the initial batch size.
        depth: frozen layer modules.
    """

    step: int
    division: Division
    squared_norm: float
    variance: float
    depth: int


class History:
    """Moments of a run in their order: no more than `MOST`, at even distances, and each change of the batch size.

    Args:
        every: steps between two moments, at first.
        moments: those so far.

    >>> history = History(every=10)
    >>> for step in (0, 5, 10, 20):
    ...     history.note(step, Division(8, 1, 1), GradientNoise(1), depth=0)
    >>> [moment.step for moment in history.moments]
    [0, 10, 20]
    """

    def __init__(self, every: int, moments: Sequence[Moment] = ()) -> None:
        self.moments = list(moments)
        self._every = every

    def note(self, step: int, division: Division, noise: GradientNoise, depth: int) -> None:
        """Add a moment, unless the last one is too near and had the same batch size."""
        last = self.moments[-1] if self.moments else None
        if last is not None and last.division == division and step < last.step + self._every:
            return
        self.moments.append(Moment(step, division, noise.squared_norm, noise.variance, depth))
        if len(self.moments) > MOST:
            self._every *= 2
            self.moments = self.moments[:-1:2] + self.moments[-1:]

    def state(self) -> dict[str, Any]:
        """Return all of it, in plain types."""
        return {"every": self._every, "moments": [dataclasses.asdict(moment) for moment in self.moments]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """Return the history from its `state`."""
        moments = [Moment(**{**moment, "division": Division(**moment["division"])}) for moment in state["moments"]]
        return cls(int(state["every"]), moments)
