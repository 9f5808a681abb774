"""The suffixes of all ranks, against their definitions."""

import itertools
import math

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.partial.grading import GradedPlan
from lightning_egeria.methods.partial.plans import GivenPlan, TemporalPlan, UniformPlan, ranks_of_share

RANKS, CHAINS = (1, 2, 3, 4, 9, 16), (1, 2, 3, 8, 13)


def mean_contributions(plan, ranks, layer_modules, steps):
    """Share of ranks and steps that compute each layer module, front to back."""
    count = [0] * layer_modules
    for step in range(steps):
        for length in plan.lengths(step, layer_modules):
            assert 1 <= length <= layer_modules
            for index in range(layer_modules - length, layer_modules):
                count[index] += 1
    return [number / (ranks * steps) for number in count]


@pytest.mark.parametrize("min_share", [0.05, 0.25, 1 / 3, 0.5, 1])
@pytest.mark.parametrize(("ranks", "layer_modules"), list(itertools.product(RANKS, CHAINS)))
def test_no_layer_module_falls_below_its_share(ranks, layer_modules, min_share):
    for plan in (TemporalPlan(ranks, min_share), UniformPlan(ranks, min_share, 1), UniformPlan(ranks, min_share, 3)):
        steps = 3 * ranks * layer_modules
        shares = mean_contributions(plan, ranks, layer_modules, steps)
        assert shares == sorted(shares)
        if steps % len(getattr(plan, "cycle", lambda _: UniformCycle)(layer_modules).lengths) == 0:
            assert shares[0] >= min_share - 1e-9
        if min_share == 1:
            assert not plan.pauses(layer_modules)
            assert shares[0] == 1


class UniformCycle:
    lengths = (1,)  # whose share holds in each step


@pytest.mark.parametrize(("ranks", "layer_modules"), list(itertools.product(RANKS, CHAINS)))
def test_uniform_suffixes_are_in_equal_distances(ranks, layer_modules):
    expected = [math.ceil((place + 1) * layer_modules / ranks) for place in range(ranks)]
    plan = UniformPlan(ranks, 1e-6, 2)
    assert list(plan.lengths(0, layer_modules)) == list(plan.lengths(1, layer_modules)) == expected
    for turn in range(2 * ranks):
        by_rank = plan.lengths(2 * turn, layer_modules)
        assert by_rank == tuple(expected[(rank + turn) % ranks] for rank in range(ranks))
    assert UniformPlan(ranks, 1e-6, 0).lengths(7, layer_modules) == tuple(expected)


def test_all_ranks_share_a_temporal_suffix():
    plan = TemporalPlan(3, 0.25)
    assert [plan.lengths(step, 8) for step in range(4)] == [(length,) * 3 for length in (8, 6, 4, 2)]
    assert not plan.differs
    assert UniformPlan(2, 0.25, 1).differs


def test_given_suffixes_are_checked():
    GivenPlan([3, 1], 0.5, 0).check(3, 2)
    GivenPlan([1, 1], 0.5, 0).check(3, 0)  # nothing can be paused, so all is whole
    with pytest.raises(ArgumentError, match=r"depths must be at most 3, the number of layer modules, got \[4, 1\]"):
        GivenPlan([4, 1], 0.5, 0).check(3, 2)
    with pytest.raises(ArgumentError, match=r"min_share=0.5 needs 1 of 2 ranks with depths of 3, the whole chain"):
        GivenPlan([2, 2], 0.5, 0).check(3, 2)
    assert not GivenPlan([3, 3], 0.5, 0).pauses(3)
    assert GivenPlan([3, 2], 0.5, 0).pauses(3)
    assert GivenPlan([3, 3], 0.5, 0).differs is False
    assert GivenPlan([4, 2], 0.5, 0).lengths(0, 3) == (3, 2)  # the front is frozen


def test_the_suffixes_that_come_are_described():
    names = [f"net.{number}" for number in range(4)]
    assert TemporalPlan(2, 0.5).describe(names, 3) == (
        "gradients of the last 4, 2 of 4 layer modules in turn; 'net.0' gets a gradient in 50% of the steps"
    )
    assert TemporalPlan(2, 0.25).describe(names, 1).startswith("gradients of the last 4, 3, 3, 3 of 4")
    text = "gradients of the last 4, 2 of 4 layer modules on rank 0, 1, ..."
    assert GivenPlan([4, 2], 0.5, 0).describe(names, 3) == text
    assert GradedPlan(2, 0.25, 4).describe(names, 3) is None


def test_a_share_of_ranks_is_rounded_up():
    assert [ranks_of_share(4, share) for share in (0.01, 0.25, 0.26, 0.5, 1)] == [1, 1, 2, 2, 4]
