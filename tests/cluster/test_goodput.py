"""Goodput: efficiency, and the batch size that gives most of it."""

import numpy as np
import pytest

from lightning_egeria.cluster.goodput import BATCH_SIZES, BatchLimits, Goodput, gain
from lightning_egeria.cluster.throughput import ThroughputModel

LIMITS = BatchLimits(initial=128, largest=4096, smallest_local=32, largest_local=512)
THROUGHPUT = ThroughputModel((0.02, 0.0005), (0.1, 0.004), (0.03, 0.002), 1.5)
GOODPUT = Goodput(THROUGHPUT, squared_norm=1.0, variance=8.0, limits=LIMITS)


def test_efficiency_at_the_initial_batch_size_is_one():
    assert GOODPUT.efficiency(np.array([128.0]))[0] == 1.0


def test_efficiency_is_that_of_the_noise_scale():
    noise_scale = 8.0 * 128
    for size in (256, 1000, 4096):
        expected = (noise_scale + 128) / (noise_scale + size)
        assert GOODPUT.efficiency(np.array([float(size)]))[0] == pytest.approx(expected)


def obvious_best(nodes, replicas):
    """As `best`, one batch size after the other."""
    best = (0.0, 0, 0)
    smallest = max(LIMITS.initial, LIMITS.smallest_local * replicas)
    for size in np.geomspace(smallest, LIMITS.largest, BATCH_SIZES):
        per_replica = size / replicas
        accumulation = int(np.ceil(per_replica / LIMITS.largest_local - 1e-8)) - 1
        if replicas == 1 and per_replica > LIMITS.initial + 1e-8:
            accumulation = max(accumulation, 1)
        local = int(np.ceil(per_replica / (accumulation + 1) - 1e-8))
        if not LIMITS.smallest_local <= local <= LIMITS.largest_local:
            continue
        total = replicas * local * (accumulation + 1)
        seconds = THROUGHPUT.step_seconds(nodes, replicas, local) + accumulation * THROUGHPUT.gradient_seconds(local)
        goodput = total / float(seconds) * GOODPUT.efficiency(np.array([float(total)]))[0]
        best = max(best, (goodput, local, accumulation), key=lambda found: found[0])
    return best


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 1), (1, 3), (1, 4), (2, 2), (2, 7), (8, 32)])
def test_the_best_batch_size_is_that_of_the_obvious_search(nodes, replicas):
    assert GOODPUT.best(nodes, replicas) == pytest.approx(obvious_best(nodes, replicas))


def test_the_best_batch_size_is_within_the_limits():
    exchange = ThroughputModel((1e-6, 1e-6), (1e-6, 1e-6), (10.0, 1e-6), 1.0)
    assert Goodput(exchange, 1e-9, 100.0, BatchLimits(16, 1000, 4, 40, 1)).best(1, 2)[1:] == (38, 12)


def test_the_table_has_each_configuration():
    one, several = GOODPUT.goodputs(4, 8)
    assert one[0] == several[0] == several[1] == 0
    assert one[1:] == pytest.approx([GOODPUT.goodput(1, replicas) for replicas in range(1, 5)])
    assert several[2:] == pytest.approx([GOODPUT.goodput(2, replicas) for replicas in range(2, 9)])


def test_noisier_gradients_get_larger_batches():
    sizes = []
    for variance in (0.1, 1.0, 10.0, 100.0):
        _, local, accumulation = Goodput(THROUGHPUT, 1.0, variance, LIMITS).best(2, 8)
        sizes.append(8 * local * (accumulation + 1))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize(
    ("size", "replicas", "split"),
    [
        (128, 1, (128, 0)),
        (129, 1, (65, 1)),
        (2048, 2, (512, 1)),
        (4096, 8, (512, 0)),
        (4096, 7, (292, 1)),
        (100, 3, (34, 0)),
    ],
)
def test_a_total_batch_size_is_split(size, replicas, split):
    local, accumulation = LIMITS.split(size, replicas)
    assert (local, accumulation) == split
    assert local * (accumulation + 1) * replicas <= LIMITS.largest


def test_without_gradient_every_batch_size_is_as_good():
    nothing = Goodput(THROUGHPUT, 0.0, 0.0, LIMITS)
    assert nothing.efficiency(np.array([128.0, 256.0])) == pytest.approx([1.0, 0.5])


def test_the_gain_is_bounded_by_the_scale():
    assert gain(1.0, 4.0, 1.0) == 1
    assert float(gain(0.0, 4.0, 8.0)) == 8
    assert float(gain(4.0, 0.0, 8.0)) == 1
    assert float(gain(0.0, 0.0, 8.0)) == 1
    assert gain([1.0, 0.0], [4.0, 0.0], 2.0).tolist() == [5 / 3, 1.0]
