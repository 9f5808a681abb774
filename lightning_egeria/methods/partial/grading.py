"""Suffixes that follow plasticity: the less a layer module changes, the fewer gradients it gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.callback import PrefixFreezing
from lightning_egeria.core.training.checkpoints import count_of, number_of
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.methods.partial.plans import SuffixPlan
from lightning_egeria.methods.partial.suffixes import steps_of_share

GRADED_EVERY_STEPS = 10


class GradedPlan(SuffixPlan):
    """All ranks share one suffix. How often each layer module is in it follows its plasticity.

    Each layer module gets gradients in proportion to its plasticity per gradient: the one with the largest in every
    step of a cycle, one with half of that in half of the steps, and none in fewer than ``min_share``. Layer modules
    behind it get at least as many. The first step of a cycle is full, and so are all steps before the first plasticity.

    Args:
        ranks: number of ranks.
        min_share: share of the steps that compute the gradient of each layer module, at least; in (0, 1].
        layer_modules: length of the chain.

    Attributes:
        counts: steps of a cycle with a gradient, by layer module, front to back.

    >>> plan = GradedPlan(ranks=1, min_share=0.25, layer_modules=4)
    >>> plan.grade([0.1, 0.5, 1.0, 1.0])
    True
    >>> plan.counts, [plan.lengths(step, layer_modules=4) for step in range(4)]
    ([1, 2, 4, 4], [(4,), (3,), (2,), (2,)])
    """

    def __init__(self, ranks: int, min_share: float, layer_modules: int) -> None:
        self.ranks = ranks
        self._cycle = steps_of_share(min_share)
        self.counts = [self._cycle] * layer_modules

    def lengths(self, step: int, layer_modules: int) -> tuple[int, ...]:
        """Return the suffix of the step, once for each rank."""
        place = step % self._cycle
        training = self.counts[len(self.counts) - layer_modules :]
        first = next(index for index, count in enumerate(training) if count > place)
        return (layer_modules - first,) * self.ranks

    @property
    def differs(self) -> bool:
        """False."""
        return False

    def pauses(self, layer_modules: int) -> bool:
        """Whether a cycle has several steps, so that it can come to that."""
        return self._cycle > 1 and layer_modules > 1

    def describe(self, names: Sequence[str], pausable: int) -> str | None:
        """None: `Grading` tells when the suffixes are known."""
        return None

    def grade(self, plasticity: Sequence[float]) -> bool:
        """Take a plasticity that was measured with the present suffixes, and return whether they change.

        Args:
            plasticity: of each layer module; NaN where it is not measured: these have a gradient in each step.
        """
        moved = [found * self._cycle / count for found, count in zip(plasticity, self.counts, strict=True)]
        most = max((one for one in moved if math.isfinite(one)), default=0.0)
        if most <= 0:
            return False
        wanted = [max(1, math.ceil(one / most * self._cycle - 1e-9)) if math.isfinite(one) else None for one in moved]
        frozen = next(index for index, count in enumerate(wanted) if count is not None)
        graded = [self._cycle if count is None else count for count in [*wanted[frozen:-1], None]]
        before, self.counts = self.counts, [self._cycle] * frozen + list(itertools.accumulate(graded, max))
        return self.counts != before

    def read(self, counts: Sequence[int]) -> None:
        """Take the counts of a checkpoint.

        Raises:
            ValueError: if they are not those of such a plan.
        """
        found = [count_of(count, 1, self._cycle) for count in counts]
        if len(found) != len(self.counts) or found[-1] != self._cycle:
            raise ValueError(f"{found} for {len(self.counts)} layer modules in {self._cycle} steps")
        self.counts = found


class Grading(Observer):
    """Passes plasticity to a `GradedPlan`, on all ranks after the same step.

    Args:
        plan: the plan.
        freezing: callback that measures plasticity, on rank 0.
        ranks: the processes of the job.
        report: takes a line for the log.
    """

    def __init__(
        self, plan: GradedPlan, freezing: PrefixFreezing, ranks: Ranks, report: Callable[[str], object] = str
    ) -> None:
        self.plan = plan
        self._freezing, self._ranks, self._report = freezing, ranks, report
        self._seen = -1  # step of the latest plasticity
        self._waiting: list[float] | None = None  # plasticity for the next grading

    def optimizer_step(self, step: int) -> None:
        """Look for a plasticity, and every few steps let all ranks have it."""
        latest = self._freezing.latest_plasticity
        if latest is not None and latest[0] != self._seen:
            self._seen, self._waiting = latest[0], list(latest[1])
        if step % GRADED_EVERY_STEPS:
            return
        found, self._waiting = self._ranks.share(self._waiting), None
        if found is not None and self.plan.grade(found):
            self._report(
                f"step {step}: of {max(self.plan.counts)} steps, layer modules get a gradient in {self.plan.counts}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return counts and the plasticity that waits, as rank 0 has it."""
        return {"counts": list(self.plan.counts), "waiting": self._waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of `state_dict`.

        Raises:
            ValueError: if it is damaged.
        """
        self.plan.read(state["counts"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else [number_of(value) for value in waiting]
        if waiting is not None and len(waiting) != len(self.plan.counts):
            raise ValueError(f"plasticity of {len(waiting)} layer modules, expected {len(self.plan.counts)}")
