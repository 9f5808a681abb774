"""The arguments of partial backprop, and the plan that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.partial.grading import GradedPlan
from lightning_egeria.methods.partial.plans import GivenPlan, SuffixPlan, TemporalPlan, UniformPlan
from lightning_egeria.methods.partial.suffixes import check_min_share
from lightning_egeria.methods.partial.weighting import WeightedPlan

NAMED = ("temporal", "graded", "uniform", "weighted")
EXCHANGES = ("contributors", "all")


@dataclasses.dataclass(frozen=True)
class PartialArguments:
    """Arguments of `StructuredPartialBackprop`.

    Raises:
        ArgumentError: if one is out of range.

    >>> PartialArguments("uniform").plan(ranks=2, layer_modules=8).lengths(0, 8)
    (4, 8)
    """

    depths: str | Sequence[int] = "temporal"
    min_share: float = 0.25
    rotate_every_n_steps: int | None = None
    exchange: str = "contributors"

    def __post_init__(self) -> None:
        named, every = isinstance(self.depths, str), self.rotate_every_n_steps
        if named and self.depths not in NAMED:
            raise ArgumentError(f"depths must be one of {NAMED} or a list of numbers, got {self.depths!r}")
        given = hasattr(self.depths, "__len__") and len(self.depths) > 0
        if not named and (not given or any(type(depth) is not int or depth < 1 for depth in self.depths)):
            raise ArgumentError(f"depths must have a whole number of at least 1 for each rank, got {self.depths!r}")
        check_min_share(self.min_share)
        if every is not None and (type(every) is not int or every < 0):
            raise ArgumentError(f"rotate_every_n_steps must be a whole number of at least 0, got {every!r}")
        if every is not None and self.depths in ("temporal", "graded", "weighted"):
            raise ArgumentError(
                f"rotate_every_n_steps is for depths='uniform' and lists, got {every} with depths={self.depths!r}"
            )
        if self.exchange not in EXCHANGES:
            raise ArgumentError(f"exchange must be one of {EXCHANGES}, got {self.exchange!r}")

    def check_size(self, ranks: int) -> None:
        """Compare the length of a list with the number of processes.

        Raises:
            ArgumentError: if they differ.
        """
        if not isinstance(self.depths, str) and len(self.depths) != ranks:
            raise ArgumentError(f"depths must have a number for each of {ranks} ranks, got {list(self.depths)}")

    def plan(self, ranks: int, layer_modules: int) -> SuffixPlan:
        """Return the suffixes of a job.

        Args:
            ranks: number of processes.
            layer_modules: length of the chain.
        """
        if self.depths == "temporal":
            return TemporalPlan(ranks, self.min_share)
        if self.depths == "graded":
            return GradedPlan(ranks, self.min_share, layer_modules)
        if self.depths == "weighted":
            return WeightedPlan(ranks, self.min_share, layer_modules)
        every = self.rotate_every_n_steps
        if isinstance(self.depths, str):
            return UniformPlan(ranks, self.min_share, 1 if every is None else every)
        return GivenPlan(self.depths, self.min_share, every or 0)
