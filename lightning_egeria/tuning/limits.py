"""What a search may spend."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a search may spend.

    Attributes:
        first_steps: optimizer steps of a trial; of the first ones if ``halving``.
        most_steps: most steps of a trial, the cooling not among them.
        most_trials: most branches.
        most_total: most steps of all branches together.
        halving: whether the faster half of the branches goes on, in trials twice as long, until one is left. Then each
            trial is cooled: it takes half as many steps again, in which its learning rates fall to zero.
    """

    first_steps: int
    most_steps: int
    most_trials: int
    most_total: float = math.inf
    halving: bool = True

    @property
    def lengths(self) -> list[int]:
        """Steps that a branch has after each round, if it stays: twice those of the round before, or nearly so.

        >>> Limits(10, 77, 20).lengths, Limits(10, 51, 20).lengths
        ([10, 20, 40, 77], [10, 20, 40])
        """
        found = [min(self.first_steps, self.most_steps)]
        while 2 * self.most_steps >= 3 * found[-1]:
            found.append(min(2 * found[-1], self.most_steps))
        return found

    @property
    def affordable(self) -> int:
        """Number of branches to begin with, two at least, so that all rounds together take ``most_total`` steps.

        >>> Limits(10, 51, 20, 312).affordable, Limits(10, 51, 20).affordable
        (9, 20)
        """
        counts = range(self.most_trials, 2, -1)
        return next((count for count in counts if self._together(count) <= self.most_total), min(2, self.most_trials))

    def cost(self, before: int, steps: int) -> int:
        """Return how many steps it takes to train a branch on, from as many steps to so many, with the cooling."""
        return steps - before + (cooling(steps) if self.halving else 0)

    def _together(self, count: int) -> int:
        steps, cost = 0, 0
        for length in self.lengths:
            cost += count * self.cost(steps, length)
            steps, count = length, max(1, count // 2)
            if count == 1:
                break
        return cost


def cooling(steps: int) -> int:
    """Return in how many steps, or batches, a branch of so many is cooled.

    >>> [cooling(steps) for steps in (1, 10, 77)]
    [0, 5, 38]
    """
    return steps // 2


def without_cooling(steps: int) -> int:
    """Return how many steps a branch may have that takes so many with its cooling.

    >>> [without_cooling(steps) for steps in (1, 2, 10, 77)]
    [1, 1, 7, 51]
    """
    return (2 * steps + 1) // 3
