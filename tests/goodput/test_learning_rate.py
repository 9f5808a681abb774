"""Factors of the learning rate by rule."""

import numpy as np
import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.goodput.learning_rate import LEGW, RULES, rule_of
from lightning_egeria.methods.goodput.noise import GradientNoise


@pytest.fixture
def noise():
    found = GradientNoise(2)
    found.add([3.0, 5.0], [2.0, 4.5], 2, 2.0)  # squared norms 1 and 4, variances 2 and 1
    return found


def test_factors(noise):
    assert rule_of("adascale", False).factors(4.0, noise, 0) == pytest.approx([3 / 1.5, 5 / 4.25])
    assert rule_of("sqrt", False).factors(4.0, noise, 0) == 2.0
    assert rule_of("linear", False).factors(4.0, noise, 0) == 4.0
    assert rule_of("none", False).factors(4.0, noise, 0) == 1.0


def test_at_the_initial_batch_size_all_are_one(noise):
    for name in RULES:
        assert np.all(rule_of(name, False).factors(1.0, noise, 1.0) == 1.0), name


def test_adascale_is_one_before_there_is_an_estimate():
    assert rule_of("adascale", False).factors(4.0, GradientNoise(2), 0) == 1.0


def test_legw_warms_up_longer_for_larger_batches(noise):
    rule = LEGW(warmup_epochs=2)
    assert [rule.factors(4.0, noise, epochs) for epochs in (0, 4, 8, 20)] == [0.0, 1.0, 2.0, 2.0]
    assert [rule.factors(9.0, noise, epochs) for epochs in (9, 18)] == [1.5, 3.0]
    assert LEGW(0).factors(4.0, noise, 0) == 2.0


def test_wrong_rules_are_refused():
    with pytest.raises(ArgumentError, match="must be 'auto', one of adascale, sqrt, linear, legw, none, or a rule"):
        rule_of("cubic", False)
    with pytest.raises(ArgumentError, match="warmup_epochs must be at least 0, got -1"):
        LEGW(-1)
    own = LEGW(3)
    assert rule_of(own, True) is own
