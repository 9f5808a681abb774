"""The suffix of each step, against its definition."""

import math

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.partial.suffixes import SuffixCycle

SHARES = [1, 0.75, 0.5, 1 / 3, 0.3, 0.25, 0.2, 1 / 7, 0.1, 0.05]


@pytest.mark.parametrize("min_share", SHARES)
@pytest.mark.parametrize("layer_modules", [1, 2, 3, 7, 8, 28])
def test_each_layer_module_has_its_share(layer_modules, min_share):
    cycle = SuffixCycle(layer_modules, min_share)
    counted = [0] * layer_modules
    for step in range(len(cycle.lengths)):
        for index in range(layer_modules - cycle.length(step), layer_modules):
            counted[index] += 1
    shares = [count / len(cycle.lengths) for count in counted]
    assert list(cycle.shares()) == shares == sorted(shares)
    assert shares[0] >= min_share - 1e-12
    assert shares[-1] == 1


@pytest.mark.parametrize("min_share", SHARES)
def test_the_cycle_is_as_long_as_the_share_allows(min_share):
    steps = len(SuffixCycle(100, min_share).lengths)
    assert 1 / steps >= min_share - 1e-12
    assert 1 / (steps + 1) < min_share


def test_lengths_are_in_equal_distances():
    for layer_modules in (5, 8, 13):
        for steps in range(1, layer_modules + 1):
            expected = [math.ceil((steps - step) * layer_modules / steps) for step in range(steps)]
            assert list(SuffixCycle(layer_modules, 1 / steps).lengths) == expected


def test_the_cycle_begins_whole_and_repeats():
    cycle = SuffixCycle(8, 0.25)
    assert [cycle.length(step) for step in range(6)] == [8, 6, 4, 2, 8, 6]
    assert [SuffixCycle(8, 1).length(step) for step in range(3)] == [8, 8, 8]


@pytest.mark.parametrize("min_share", [0, -0.1, 1.01, math.nan, math.inf])
def test_a_share_out_of_range_is_refused(min_share):
    with pytest.raises(ArgumentError, match=r"min_share must be a share in \(0, 1\], got"):
        SuffixCycle(3, min_share)


def test_a_chain_without_layer_modules_is_refused():
    with pytest.raises(ArgumentError, match="layer_modules must be at least 1, got 0"):
        SuffixCycle(0, 0.5)
