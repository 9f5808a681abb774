"""Shorter suffixes for slow ranks, from times that the test makes."""

import itertools
import math

import pytest

from lightning_egeria.methods.partial.weighting import (
    RankTimes,
    SuffixTimes,
    WeightedPlan,
    balanced_depths,
    packed,
    unpacked,
)

CURVE = (2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25)


def rank(slowness=1.0):
    return RankTimes(slowness, tuple(slowness * seconds for seconds in CURVE))


@pytest.mark.parametrize("slowness", [1.0, 1.04, 1.2, 1.5, 2.0, 2.5])
def test_a_slow_rank_takes_as_long_as_the_others(slowness):
    fast, slow = balanced_depths([rank(), rank(slowness)], min_share=0.25)
    assert fast == 0
    whole = rank().seconds(0)
    if rank(slowness).seconds(0) <= 1.05 * whole:
        assert slow == 0
    else:
        assert rank(slowness).seconds(slow - 1) > whole
        assert rank(slowness).seconds(slow) <= whole or slow == len(CURVE) - 1


def test_a_rank_that_is_too_slow_has_the_shortest_suffix():
    assert balanced_depths([rank(), rank(100.0)], min_share=0.25) == (0, 7)


@pytest.mark.parametrize("min_share", [0.01, 0.25, 0.5, 0.75, 1])
def test_enough_ranks_have_whole_steps(min_share):
    for slownesses in itertools.product([1.0, 1.3, 2.0, 3.0], repeat=4):
        depths = balanced_depths([rank(slowness) for slowness in slownesses], min_share)
        assert depths.count(0) >= max(2, math.ceil(4 * min_share))  # the faster half, too
        by_slowness = [depth for _, depth in sorted(zip(slownesses, depths, strict=True))]
        assert by_slowness == sorted(depths)


def test_the_plan_is_whole_until_it_is_balanced():
    plan = WeightedPlan(2, 0.25, 8)
    assert plan.lengths(3, 8) == (8, 8)
    assert plan.pauses(8)
    assert not WeightedPlan(1, 0.25, 8).pauses(8)
    assert plan.balance([rank(), rank(1.5)])
    assert not plan.balance([rank(), rank(1.5)])
    assert plan.depths[0] == 0 < plan.depths[1]
    assert plan.lengths(3, 8) == (8, 8 - plan.depths[1])
    assert plan.lengths(3, 2) == (2, 2)  # of which six are frozen


class TestTimes:
    def test_nothing_is_estimated_before_a_whole_batch(self):
        times = SuffixTimes(2)
        for _ in range(10):
            times.add(1, 1.0, [None, 1.0])
        assert times.estimate() is times.shares() is times.curve() is None

    def test_the_first_batches_do_not_count(self):
        times = SuffixTimes(2)
        for _ in range(3):
            times.add(0, 100.0, [100.0, 100.0])
        times.add(0, 1.0, [2.0, 1.0])
        assert times.estimate() == RankTimes(1.0, (2.0, 1.0))
        assert times.shares() == (1.0, 0.5)
        assert not times.full
        for _ in range(20):
            times.add(0, 1.0, [2.0, 1.0])
        assert times.full

    def test_one_that_recovers_is_seen(self):
        times = SuffixTimes(2)
        for _ in range(13):
            times.add(0, 2.0, [4.0, 2.0])
        for _ in range(10):
            times.add(1, 1.0, [None, 1.0])
        assert times.estimate() == RankTimes(1.0, (2.0, 1.0))

    def test_they_are_sent_as_numbers(self):
        assert unpacked([packed(rank(), 8), packed(rank(2.0), 8)]) == [rank(), rank(2.0)]
        assert unpacked([packed(rank(), 8), packed(None, 8)]) is None
        assert len(packed(None, 8)) == len(packed(rank(), 8))
