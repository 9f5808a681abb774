"""What a trial of depths may try: its depths, its steps, and a budget for the work that training does not keep.

Work is counted in full steps. A step at a depth is estimated by the length of the chain, not by a clock, so that two
runs of one seed try the same depths.
"""

from __future__ import annotations

BUDGET = 0.05  # share of the run's work that a trial may lose
STEPS_PER_RUN = 48  # a trial takes one of this many steps
LEAST_STEPS, MOST_STEPS = 8, 64
ALWAYS_LEARNING = 3  # layer modules at the end that the first depth leaves out


def candidate_depths(layer_modules: int, max_depth: int) -> list[int]:
    """Return the depths to try, deepest first: all but 3, then a fifth of the chain less each, and none.

    Args:
        layer_modules: length of the chain.
        max_depth: how many may freeze.

    >>> candidate_depths(18, 17), candidate_depths(10, 9), candidate_depths(8, 4), candidate_depths(3, 2)
    ([15, 11, 7, 3, 0], [7, 5, 3, 1, 0], [4, 3, 1, 0], [1, 0])
    """
    first = max(layer_modules // 2, layer_modules - ALWAYS_LEARNING)
    depths = {*range(first, 0, -max(1, round(layer_modules / 5))), 0}
    if first > max_depth:
        depths.add(max_depth)
    return sorted((depth for depth in depths if depth <= max_depth), reverse=True)


def trial_steps(estimated_steps: float) -> int:
    """Return the number of optimizer steps of a trial in a run of this many steps.

    >>> trial_steps(100), trial_steps(960), trial_steps(float("inf"))
    (8, 20, 64)
    """
    return round(max(LEAST_STEPS, min(MOST_STEPS, estimated_steps / STEPS_PER_RUN)))


class Budget:
    """The work that a trial may lose: at most `BUDGET` of the whole run's at the depth that is ahead.

    Args:
        run_steps: optimizer steps of the run; may be infinite.
        steps: optimizer steps of the trial.
        layer_modules: length of the chain.

    Attributes:
        lost: work so far that training does not keep, in full steps.

    >>> budget = Budget(run_steps=384, steps=8, layer_modules=18)
    >>> budget.allows(11, ahead=15), budget.allows(0, ahead=15)
    (True, True)
    >>> budget.lose(15)
    >>> round(budget.lost, 2), budget.allows(7, ahead=11), budget.allows(0, ahead=11)
    (3.56, True, False)
    """

    def __init__(self, run_steps: float, steps: int, layer_modules: int) -> None:
        self._run_steps = run_steps
        self._steps = steps
        self._layer_modules = layer_modules
        self.lost = 0.0

    def work(self, depth: int) -> float:
        """Return the work of a step, as a share of a full one: frozen layer modules run forward only."""
        return 1 - 2 / 3 * depth / self._layer_modules

    def allows(self, depth: int, ahead: int) -> bool:
        """Whether a depth may be tried, even if the one that is ``ahead`` wins."""
        lost = self.lost + self._steps * self.work(depth)
        return lost <= BUDGET * self._run_steps * self.work(ahead)

    def lose(self, depth: int) -> None:
        """Count the steps at a depth that did not win."""
        self.lost += self._steps * self.work(depth)
