"""When to tune again."""

import math

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.plateau import Advice, Plateau


def test_four_without_a_better_one_tune_and_five_stop():
    plateau = Plateau(patience=4, stop_patience=5)
    values = [1.0, 1.0, 1.1, math.nan, 1.2, 1.3]
    assert [plateau.update(value) for value in values] == [Advice.GO_ON] * 4 + [Advice.TUNE, Advice.STOP]


def test_a_better_one_begins_the_count_again():
    plateau = Plateau("max", patience=2)
    values = [0.1, 0.1, 0.2, 0.1, 0.2, 0.2, 0.2]
    advice = [plateau.update(value) for value in values]
    assert [number for number, one in enumerate(advice) if one is Advice.TUNE] == [4, 6]
    assert (plateau.best, plateau.waited) == (0.2, 4)


@pytest.mark.parametrize("arguments", [{"mode": "best"}, {"patience": 0}, {"stop_patience": 0}])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ArgumentError, match="must be"):
        Plateau(**arguments)
