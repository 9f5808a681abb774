"""Which gradients go together, and the bytes that they take."""

import itertools

import pytest
import torch
from torch import nn

from lightning_egeria.methods.partial.buckets import buckets_of, contributors_of, received_bytes

SIZES = (3, 5, 7, 11)  # of three layer modules and the rest


def layers(sizes=SIZES, **options):
    return [[nn.Parameter(torch.zeros(size, **options))] for size in sizes]


def bytes_of_the_formula(depths):
    """``2 (k - 1) P + (n - k) P`` for each layer module with contributors."""
    total = 0
    for index, size in enumerate(SIZES):
        k, n = len(contributors_of(depths, index)), len(depths)
        total += (2 * (k - 1) + (n - k)) * 4 * size if k else 0
    return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_are_those_of_the_formula_at_all_depths(ranks):
    parts = layers()
    for depths in itertools.product(range(4), repeat=ranks):
        buckets = buckets_of(parts, depths)
        received = sum(bucket.received(rank) for bucket in buckets for rank in range(ranks))
        assert received == pytest.approx(bytes_of_the_formula(depths))
        computed = {p for bucket in buckets for p in bucket.parameters}
        assert computed == {parts[i][0] for i in range(4) if contributors_of(depths, i)}


def test_neighbours_with_the_same_contributors_share_a_bucket():
    parts = layers()
    buckets = buckets_of(parts, (0, 2))
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == [[11, 7], [5, 3]]
    assert [bucket.contributors for bucket in buckets] == [(0, 1), (0,)]
    assert [bucket.receivers for bucket in buckets] == [(0,), (0, 1)]
    small = buckets_of(parts, (0, 2), most_bytes=50)
    assert [[p.numel() for p in bucket.parameters] for bucket in small] == [[11], [7], [5, 3]]


def test_each_dtype_has_its_own_bucket():
    parts = [[*layers((2,))[0], *layers((4,), dtype=torch.float64)[0]], []]
    assert [bucket.nbytes for bucket in buckets_of(parts, (0, 0))] == [8, 32]


def test_what_nobody_computes_is_not_exchanged():
    assert [bucket.nbytes for bucket in buckets_of(layers(), (2, 2))] == [4 * 18]
    assert received_bytes(100, 0, contributes=False) == 0
