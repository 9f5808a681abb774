"""Values of a tunable."""

import random

import numpy as np
import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.spaces import Choice, LogUniform, Uniform


@pytest.mark.parametrize("space", [Choice([1, 2, "a", False]), Uniform(-1, 2), LogUniform(1e-5, 1)])
def test_draws_are_values_and_repeatable(space):
    first, again = ([space.draw(generator) for _ in range(50)] for generator in (random.Random(3), random.Random(3)))
    assert first == again
    if isinstance(space, Choice):
        assert set(first) == set(space.values)
    else:
        assert all(space.low <= value <= space.high for value in first)
        assert len(set(first)) == 50


def test_each_factor_is_as_likely():
    generator = random.Random(0)
    values = [LogUniform(1e-4, 1).draw(generator) for _ in range(4000)]
    assert sum(value < 1e-2 for value in values) / 4000 == pytest.approx(0.5, abs=0.03)


def test_grids_have_both_ends():
    assert Uniform(0, 1).grid(3) == [0, 0.5, 1]
    assert LogUniform(1e-4, 1).grid(3) == pytest.approx([1e-4, 1e-2, 1])
    assert LogUniform(1e-4, 1).grid(1) == pytest.approx([1e-2])
    assert Choice([3, 1]).grid(1) == [3, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choice([]),
        lambda: Choice("abc"),
        lambda: Choice([1, 1]),
        lambda: Choice([1, True]),
        lambda: Choice([float("nan")]),
        lambda: Choice(3),
        lambda: Uniform("a", 1),
        lambda: Uniform(True, 3),
        lambda: Choice([(0.9, 0.99)]),
        lambda: Choice([None]),
        lambda: Uniform(1, 1),
        lambda: Uniform(0, float("inf")),
        lambda: LogUniform(0, 1),
        lambda: LogUniform(2, 1),
    ],
)
def test_a_wrong_space_is_refused(make):
    with pytest.raises(ArgumentError, match=r"Choice needs|Uniform needs"):
        make()


def test_numbers_of_numpy_are_numbers():
    assert Choice(list(np.array([0.001, 0.1]))).values == [0.001, 0.1]
    space = LogUniform(np.float64(1e-4), np.float64(1))
    assert (type(space.low), space.high) == (float, 1.0)
