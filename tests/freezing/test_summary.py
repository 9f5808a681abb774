"""The savings of a run, put together from what was measured in it."""

import pytest
from held import Asked, Run

from lightning_egeria.freezing.summary import summarize
from lightning_egeria.profiling.costs import WARM_UP_STEPS
from lightning_egeria.training.freezer import Decision, FreezingEvent


@pytest.fixture
def run():
    return Run(Asked())


def freeze(step, depth):
    return FreezingEvent(step, "freeze", depth, "")


def add(run, depth, seconds, steps):
    for _ in range(steps):
        run.comparison.costs.add(depth, seconds, evaluated=False)


def frozen_at(savings):
    return [module.frozen_at_step for module in savings.layer_modules]


def test_nothing_happened(run):
    savings = summarize(run.guide, [])
    assert savings.frozen_depth == 0
    assert frozen_at(savings) == [None, None, None]
    assert (savings.seconds_saved, savings.step_seconds_before, savings.step_seconds_after) == (None, None, None)
    assert (savings.evaluations_done, savings.evaluations_late, savings.evaluations_dropped) == (0, 0, 0)


def test_the_freeze_that_lasted_is_the_one_that_counts(run):
    events = [freeze(3, 1), freeze(5, 2), FreezingEvent(8, "unfreeze", 0, ""), freeze(11, 1), freeze(14, 2)]
    assert frozen_at(summarize(run.guide, events)) == [11, 14, None]
    assert summarize(run.guide, events).frozen_depth == 2


def test_a_layer_module_that_was_released_is_not_frozen(run):
    events = [freeze(3, 2), FreezingEvent(8, "unfreeze", 1, "")]
    assert frozen_at(summarize(run.guide, events)) == [3, None, None]


def test_seconds_are_those_of_the_steps_less_the_evaluations(run):
    add(run, 0, 4.0, WARM_UP_STEPS + 5)
    add(run, 1, 3.0, WARM_UP_STEPS + 5)
    run.comparison.costs.evaluation_seconds = 2.5
    savings = summarize(run.guide, [freeze(8, 1)])
    assert (savings.step_seconds_before, savings.step_seconds_after) == (4.0, 3.0)
    assert savings.evaluation_seconds == 2.5
    assert savings.seconds_saved == WARM_UP_STEPS + 5 - 2.5


def test_evaluations_are_counted():
    run = Run(Asked({7: Decision(1, "")})).steps(9)
    savings = summarize(run.guide, run.events)
    counts = run.evaluations.counts
    assert counts.done > 0
    assert savings.evaluations_done == counts.done
    assert savings.evaluations_dropped == counts.dropped
    assert savings.reference_precision == "float32"
    assert savings.bytes_per_evaluation > 0
    assert savings.bytes_per_snapshot > 0


def test_gradients_are_exchanged_only_between_several_ranks(run):
    savings = summarize(run.guide, [freeze(3, 1)])
    assert (savings.gradient_bytes_before, savings.gradient_bytes_after) == (None, None)
    run.freezer.ranks.size = 2
    savings = summarize(run.guide, [freeze(3, 1)])
    layer = (4 * 4 + 4) * 4  # bytes
    assert savings.gradient_bytes_before == 3 * layer + (4 * 2 + 2) * 4
    assert savings.gradient_bytes_after == savings.gradient_bytes_before - layer
