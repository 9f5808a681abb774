"""Which suffix each rank computes the gradients of in each step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.partial.suffixes import SuffixCycle


class SuffixPlan:
    """The suffixes of all ranks, step by step. Every rank has the same plan."""

    def lengths(self, step: int, layer_modules: int) -> tuple[int, ...]:
        """Return the number of layer modules in the suffix of each rank, at least 1.

        Args:
            step: number of optimizer steps so far.
            layer_modules: number of layer modules that train: those behind the frozen ones.
        """
        raise NotImplementedError

    @property
    def differs(self) -> bool:
        """Whether ranks have different suffixes in one step."""
        return True

    def pauses(self, layer_modules: int) -> bool:
        """Whether any rank ever has less than the whole chain."""
        return min(self.lengths(0, layer_modules)) < layer_modules

    def check(self, layer_modules: int, pausable: int) -> None:
        """Compare the plan with the layer chain. Does nothing by default.

        Args:
            layer_modules: length of the chain.
            pausable: number of layer modules that can do without their gradient.
        """

    def describe(self, names: Sequence[str], pausable: int) -> str | None:
        """Return the suffixes that come, in words; None if the plan tells of them itself.

        Args:
            names: of all layer modules, front to back.
            pausable: number of layer modules that can do without their gradient.
        """
        told = ", ".join(map(str, self.lengths(0, len(names))))
        return f"gradients of the last {told} of {len(names)} layer modules on rank 0, 1, ..."


class TemporalPlan(SuffixPlan):
    """All ranks share one suffix, which changes with the step as `SuffixCycle` says.

    Attributes:
        cycle: returns the cycle for a number of layer modules.

    >>> plan = TemporalPlan(ranks=2, min_share=0.5)
    >>> [plan.lengths(step, layer_modules=8) for step in range(3)]
    [(8, 8), (4, 4), (8, 8)]
    """

    def __init__(self, ranks: int, min_share: float) -> None:
        self.ranks = ranks
        self.cycle: Callable[[int], SuffixCycle] = functools.cache(functools.partial(SuffixCycle, min_share=min_share))

    def lengths(self, step: int, layer_modules: int) -> tuple[int, ...]:
        """Return the suffix of the step, once for each rank."""
        return (self.cycle(layer_modules).length(step),) * self.ranks

    @property
    def differs(self) -> bool:
        """False."""
        return False

    def pauses(self, layer_modules: int) -> bool:
        """Whether the cycle has several steps."""
        return len(self.cycle(layer_modules).lengths) > 1

    def describe(self, names: Sequence[str], pausable: int) -> str | None:
        """Return the lengths of the cycle, and how often the first layer module has a gradient."""
        cycle, least = self.cycle(len(names)), len(names) - pausable
        told = ", ".join(str(max(length, least)) for length in cycle.lengths)
        return (
            f"gradients of the last {told} of {len(names)} layer modules in turn; {names[0]!r} gets a gradient in "
            f"{cycle.shares()[0]:.0%} of the steps"
        )


class UniformPlan(SuffixPlan):
    """Suffixes in equal distances: the rank in place ``w`` of ``n`` has the last ``ceil((w + 1) L / n)`` of ``L``.

    The last ``ceil(min_share n)`` places have the whole chain. Ranks change places by one every few steps.

    Args:
        ranks: number of ranks.
        min_share: share of the ranks that compute the gradient of each layer module, at least; in (0, 1].
        rotate_every_n_steps: 0: ranks keep their places.

    >>> plan = UniformPlan(ranks=4, min_share=0.25, rotate_every_n_steps=1)
    >>> [plan.lengths(step, layer_modules=8) for step in range(3)]
    [(2, 4, 6, 8), (4, 6, 8, 2), (6, 8, 2, 4)]
    >>> UniformPlan(4, 0.5, 0).lengths(7, 8)
    (2, 4, 8, 8)
    """

    def __init__(self, ranks: int, min_share: float, rotate_every_n_steps: int) -> None:
        self.ranks, self.rotate_every_n_steps = ranks, rotate_every_n_steps
        self._whole = ranks_of_share(ranks, min_share)

    def lengths(self, step: int, layer_modules: int) -> tuple[int, ...]:
        """Return the suffixes, by the place of each rank in this step."""
        by_place = [-(-(place + 1) * layer_modules // self.ranks) for place in range(self.ranks)]
        by_place[self.ranks - self._whole :] = [layer_modules] * self._whole
        return rotated(by_place, step, self.rotate_every_n_steps)


class GivenPlan(SuffixPlan):
    """Suffixes that the user has given, one for each rank.

    Args:
        given: number of layer modules, by rank. With fewer to train, all of these.
        min_share: share of the ranks that compute the gradient of each layer module, at least; in (0, 1].
        rotate_every_n_steps: 0: ranks keep their suffixes.

    Raises:
        ArgumentError: if fewer ranks than ``min_share`` have the longest suffix there is.
    """

    def __init__(self, given: Sequence[int], min_share: float, rotate_every_n_steps: int) -> None:
        self.given, self.min_share, self.rotate_every_n_steps = tuple(given), min_share, rotate_every_n_steps

    def lengths(self, step: int, layer_modules: int) -> tuple[int, ...]:
        """Return the given suffixes."""
        return rotated([min(length, layer_modules) for length in self.given], step, self.rotate_every_n_steps)

    @property
    def differs(self) -> bool:
        """Whether not all are equal."""
        return len(set(self.given)) > 1

    def check(self, layer_modules: int, pausable: int) -> None:
        """Compare the suffixes with the layer chain.

        Raises:
            ArgumentError: if a suffix is longer than the chain, or fewer than ``min_share`` of the ranks compute the
                gradient of a layer module.
        """
        if max(self.given) > layer_modules:
            raise ArgumentError(
                f"depths must be at most {layer_modules}, the number of layer modules, got {list(self.given)}"
            )
        whole = sum(layer_modules - length <= 0 for length in self.given)
        needed = ranks_of_share(len(self.given), self.min_share)
        if pausable and whole < needed:
            raise ArgumentError(
                f"min_share={self.min_share:g} needs {needed} of {len(self.given)} ranks with depths of "
                f"{layer_modules}, the whole chain, got {list(self.given)}. The first layer modules would train on too "
                "few gradients"
            )


def ranks_of_share(ranks: int, share: float) -> int:
    """Return the fewest ranks that are such a share of all.

    >>> ranks_of_share(4, 0.25), ranks_of_share(3, 0.25), ranks_of_share(10, 0.1)
    (1, 1, 1)
    """
    return max(1, math.ceil(share * ranks - 1e-9))


def rotated(lengths: Sequence[int], step: int, every: int) -> tuple[int, ...]:
    """Return the lengths after each rank has taken the place of the next one every few steps.

    Args:
        lengths: by place.
        step: number of optimizer steps so far.
        every: steps between two changes; 0: none.
    """
    turned = step // every % len(lengths) if every else 0
    return tuple(lengths[(rank + turned) % len(lengths)] for rank in range(len(lengths)))
