"""Which batch size is chosen."""

import pytest

from lightning_egeria.cluster.goodput import BatchLimits, Goodput
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.goodput.decision import (
    Division,
    LargestGoodput,
    ScriptedBatchSizes,
    estimate,
    limits_of,
)

LIMITS = BatchLimits(initial=32, largest=1024, smallest_local=16, largest_local=256)
# Nearly all of a step is constant: larger batches cost next to nothing.
QUICK = ThroughputModel((0.1, 0.0001), (0.2, 0.01), (0.1, 0.01), 1.5)
# Time grows with the samples: larger batches save nothing.
SLOW = ThroughputModel((1e-6, 0.01), (0.2, 0.01), (0.1, 0.01), 1.5)


def job(throughput, squared=1.0, variance=100.0, limits=LIMITS):
    return Goodput(throughput, squared, variance, limits)


def test_noisy_gradients_on_a_device_with_room_get_large_batches():
    found = LargestGoodput().next(100, Division(32, 1, 1), 1, LIMITS, lambda: job(QUICK))
    assert found.total > 256
    assert found.local <= 256
    assert estimate(job(QUICK), found, 1).goodput >= 1.05 * estimate(job(QUICK), Division(32, 1, 1), 1).goodput


def test_where_samples_cost_their_time_it_stays():
    assert LargestGoodput().next(100, Division(32, 1, 1), 1, LIMITS, lambda: job(SLOW)) is None


def test_a_little_better_is_not_enough():
    rule, best = LargestGoodput(), LargestGoodput().next(100, Division(32, 1, 1), 1, LIMITS, lambda: job(QUICK))
    assert rule.next(100, best, 1, LIMITS, lambda: job(QUICK)) is None
    near = Division(int(best.local * 0.95), best.batches, 1)
    assert rule.next(100, near, 1, LIMITS, lambda: job(QUICK)) is None
    assert rule.next(100, near, 1, LIMITS, lambda: None) is None


def test_efficiency_at_the_initial_batch_size_is_one():
    assert estimate(job(QUICK), Division(32, 1, 1), 1).efficiency == 1.0
    assert estimate(job(QUICK), Division(8, 2, 2), 1).efficiency == 1.0
    found = estimate(job(QUICK), Division(64, 2, 1), 1)
    assert found.throughput == pytest.approx(128 / (2 * (0.1 + 0.0064)))
    assert found.goodput == pytest.approx(found.throughput * found.efficiency)


def no_measurement():
    raise AssertionError("a script goes by nothing that is measured")


def test_a_script_is_followed():
    rule = ScriptedBatchSizes({10: 64, 5: 512, 20: 1024}, 1024)
    now = Division(32, 1, 2)
    assert rule.next(4, now, 1, LIMITS, no_measurement) is None
    assert rule.next(5, now, 1, LIMITS, no_measurement) == Division(256, 1, 2)
    assert rule.next(19, now, 1, LIMITS, no_measurement) is None
    assert rule.next(25, now, 1, LIMITS, no_measurement) == Division(256, 2, 2)
    assert rule.next(25, now, 1, BatchLimits(32, 1023, 16, 300), no_measurement) == Division(255, 2, 2)
    for wrong in ({-1: 8}, {0: 0}, {0.5: 8}, {1: 8.0}):
        with pytest.raises(ArgumentError, match="batch_sizes must map steps"):
            ScriptedBatchSizes(wrong, 64)
    for wrong in ({0: 65}, [8, 16]):
        with pytest.raises(ArgumentError, match="batch_sizes must map steps"):
            ScriptedBatchSizes(wrong, 64)


def test_limits_leave_room_for_each_process():
    assert limits_of(32, 1024, 16, None, 2) == BatchLimits(32, 1024, 16, 512, 1)
    assert limits_of(32, 1024, 16, 100, 2) == BatchLimits(32, 1024, 16, 100, 1)
    assert limits_of(32, 32, 16, None, 1) == BatchLimits(32, 32, 16, 32, 1)
    with pytest.raises(ArgumentError, match=r"max_batch_size must be at least 128, .* got 64"):
        limits_of(32, 64, 16, None, 8)
    with pytest.raises(ArgumentError, match="max_batch_size must be at least 32"):
        limits_of(32, 16, 8, None, 1)
