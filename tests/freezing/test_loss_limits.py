"""How deep pre-trained weights may freeze where no depth can be tried."""

import itertools
import math

import pytest

from lightning_egeria.freezing.loss_limits import LIMITS, limits_of, untried_depth

MINILM = (11720448, 198144, *[1774464] * 6)  # two tables, and six layers of one size
LITE0 = (928, 896, 5136, 8832, 13472, 26240, 32080, 83200, 83200, 106304, 170240, 170240, 224160, *[476160] * 3)
LITE0 = (*LITE0, 605440, 412160)


def test_each_row_loses_more_and_freezes_no_less():
    for less, more in itertools.pairwise(LIMITS):
        assert less.points < more.points
        assert less.progress >= more.progress
        for share in ("weights", "layers", "before_untrained"):
            assert 0 <= getattr(less, share) <= getattr(more, share) <= 1


@pytest.mark.parametrize(("points", "row"), [(0, 0), (0.9, 0), (1, 1), (2, 2), (4, 2), (5, 3), (12, 4), (math.inf, 4)])
def test_the_widest_limits_below_the_accepted_loss_count(points, row):
    assert limits_of(points) is LIMITS[row]


@pytest.mark.parametrize(("row", "depth"), [(0, 3), (1, 4), (2, 5), (3, 6), (4, 7)])
def test_depths_of_minilm(row, depth):
    """A quarter, a third, half and two thirds of its six layers behind the tables."""
    assert untried_depth(MINILM, 7, 2, LIMITS[row]) == depth


@pytest.mark.parametrize(("row", "depth"), [(0, 9), (1, 9), (2, 9), (3, 13), (4, 17)])
def test_depths_of_efficientnet(row, depth):
    """Its front has few weights, so the share of layer modules counts."""
    assert untried_depth(LITE0, 17, 0, LIMITS[row]) == depth


@pytest.mark.parametrize(("row", "depth"), [(0, 0), (1, 0), (2, 9), (3, 13), (4, 17)])
def test_depths_in_front_of_an_untrained_part(row, depth):
    assert untried_depth(LITE0, 17, 0, LIMITS[row], before_untrained=True) == depth


def test_tables_freeze_alone():
    assert untried_depth(MINILM, 7, 2, LIMITS[0], before_untrained=True) == 2


@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize("tables", range(3))
@pytest.mark.parametrize("max_depth", [1, 3, 7])
def test_no_more_freezes_than_may(row, tables, max_depth):
    assert 0 <= untried_depth(MINILM, max_depth, tables, LIMITS[row]) <= max_depth
