"""Depths, steps and budget of a trial."""

import math

import pytest

from lightning_egeria.freezing.trial_plan import BUDGET, Budget, candidate_depths, trial_steps


@pytest.mark.parametrize("layers", [2, 3, 5, 8, 10, 18, 50])
@pytest.mark.parametrize("limit", [1, 3, 7, 17, 49])
def test_candidates_fall_to_none(layers, limit):
    deepest = min(limit, layers - 1)
    depths = candidate_depths(layers, deepest)
    assert depths == sorted(set(depths), reverse=True)
    assert depths[-1] == 0
    assert depths[0] == min(deepest, max(layers // 2, layers - 3))
    assert len(depths) <= 8


@pytest.mark.parametrize("steps", [1, 250, 1000, 10**5, math.inf])
def test_a_trial_takes_few_steps(steps):
    assert 8 <= trial_steps(steps) <= 64
    if 384 <= steps < 3072:
        assert trial_steps(steps) == round(steps / 48)


@pytest.mark.parametrize("run_steps", [100, 240, 384, 628, 2000, 10**4])
@pytest.mark.parametrize("layers", [5, 8, 10, 18, 50])
@pytest.mark.parametrize("winner", range(7))
def test_the_budget_is_kept_whichever_depth_wins(run_steps, layers, winner):
    """The walk of the trial: what is lost at its end is at most the share of the run, at the depth it stays at."""
    depths = candidate_depths(layers, layers - 1)
    steps = trial_steps(run_steps)
    budget = Budget(run_steps, steps, layers)
    best = depths[0]
    for at, depth in enumerate(depths[1:], start=1):
        if not budget.allows(depth, ahead=best):
            break
        if at > winner:
            budget.lose(depth)
            break
        budget.lose(best)
        best = depth
    assert budget.lost <= BUDGET * run_steps * budget.work(best) + 1e-9


def test_a_run_without_an_end_may_try_everything():
    budget = Budget(math.inf, 64, 18)
    assert all(budget.allows(depth, ahead=15) for depth in candidate_depths(18, 17))


def test_deeper_steps_are_less_work():
    budget = Budget(100, 8, 10)
    works = [budget.work(depth) for depth in range(11)]
    assert works == sorted(works, reverse=True)
    assert works[0] == 1
    assert works[10] == pytest.approx(1 / 3)
