"""What a job saves that freezes its converged layers, from a measured run."""

from __future__ import annotations

import bisect
import dataclasses
from pathlib import Path

import numpy as np

from lightning_egeria.core.programs.files import read_json
from lightning_egeria.errors import TraceError

_LARGEST = 2**24  # bytes of each file


@dataclasses.dataclass(frozen=True)
class FreezingRun:
    """How the gradient time of a step falls while a run freezes.

    Attributes:
        progress: share of the run at which each freeze or unfreeze happened, rising.
        shares: gradient time from then on, relative to nothing frozen.
    """

    progress: tuple[float, ...]
    shares: tuple[float, ...]

    def share_at(self, progress: float) -> float:
        """Return the gradient time relative to nothing frozen.

        >>> FreezingRun((0.5, 0.75), (0.6, 0.4)).share_at(0.6)
        0.6
        """
        passed = bisect.bisect_right(self.progress, progress)
        return self.shares[passed - 1] if passed else 1.0

    @classmethod
    def read(cls, run: Path, costs: Path) -> FreezingRun:
        """Read a run of the proof that froze, and what its steps cost.

        Args:
            run: the result of a run: ``steps``, and ``events`` with the step and the frozen depth after it.
            costs: ``costs.json`` of its workload: ``shares`` of a step by frozen depth. What was not measured lies on
                a line between its neighbours.

        Raises:
            TraceError: a file is missing or damaged.
        """
        try:
            result, shares = read_json(run, _LARGEST), read_json(costs, _LARGEST)["shares"]
            known = sorted({0: 1.0, **{int(k): float(v) for k, v in shares.items() if k.isdigit()}}.items())
            depths, costs_at = [depth for depth, _ in known], [share for _, share in known]
            events = sorted((event["step"] / result["steps"], event["depth"]) for event in result["events"])
            if not all(type(depth) is int for _, depth in events):
                raise ValueError("expected whole numbers of frozen layer modules")
            after = np.interp([depth for _, depth in events], depths, costs_at)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise TraceError(f"{run} and {costs} are not a measured freezing run: {error}") from error
        return cls(tuple(progress for progress, _ in events), tuple(map(float, after)))
