"""How far training has come, in steps of the initial batch size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

COUNTS = ("epoch", "step", "progress")


@dataclasses.dataclass
class Progress:
    """Scale-invariant iterations, and the steps that schedulers count.

    A step with the gain ``r`` makes as much progress as ``r`` steps at the initial batch size (Qiao et al., OSDI 2021,
    section 3.1). Schedulers that Lightning calls after each step may count three things:

    * ``"epoch"``: the steps that the samples of the epoch so far would take at the initial batch size, so a schedule
      made for some epochs ends with them
    * ``"step"``: optimizer steps, as Lightning does
    * ``"progress"``: whole units of progress

    Attributes:
        initial: the initial batch size.
        iterations: scale-invariant iterations so far.
        samples: samples of the epoch so far.

    >>> progress = Progress(initial=10)
    >>> [progress.step(20, gain=1.5, count="epoch") for _ in range(2)], progress.iterations
    ([2, 2], 3.0)
    >>> Progress(initial=10).step(20, gain=1.5, count="progress"), Progress(10).step(20, gain=1.5, count="step")
    (1, 1)
    """

    initial: int
    iterations: float = 0.0
    samples: int = 0

    def step(self, samples: int, gain: float, count: str) -> int:
        """Count an optimizer step and return how often a scheduler counts it; at least once.

        Args:
            samples: of all processes, in this step.
            gain: of the step; at least 1.
            count: one of `COUNTS`.
        """
        before, self.iterations = self.iterations, self.iterations + gain
        begun, self.samples = self.samples, self.samples + samples
        if count == "progress":
            return max(1, math.floor(self.iterations) - math.floor(before))
        if count == "epoch":
            return max(1, -(-self.samples // self.initial) - -(-begun // self.initial))
        return 1

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self.samples = 0

    def state(self) -> dict[str, Any]:
        """Return the fields."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Return the progress from its `state`."""
        return cls(int(state["initial"]), float(state["iterations"]), int(state["samples"]))
