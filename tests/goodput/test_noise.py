"""Estimates of |G|^2 and tr(S) against gradients of known mean and covariance."""

import numpy as np
import pytest

from lightning_egeria.methods.goodput.noise import GradientNoise

TRUE = np.random.default_rng(0).normal(size=400) * 0.3
DEVIATIONS = np.linspace(0.1, 2.0, 400)  # of the gradient of one sample
INITIAL = 8  # samples
SQUARED, TRACE = float(TRUE @ TRUE), float(DEVIATIONS @ DEVIATIONS)


def gradients(random, count, samples):
    return TRUE + random.normal(size=(count, 400)) * DEVIATIONS / np.sqrt(samples)


def norms(found):
    """Mean of the squared norms, and squared norm of the mean, in two groups."""
    parts = found[:, :150], found[:, 150:]
    return [(p**2).sum(1).mean() for p in parts], [(p.mean(0) ** 2).sum() for p in parts]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("samples", [8, 32])  # of each gradient
def test_estimates_are_within_two_percent(count, samples):
    random, noise = np.random.default_rng(1), GradientNoise(2)
    for _ in range(2000):
        noise.add(*norms(gradients(random, count, samples)), count, count * samples / INITIAL)
    assert noise.squared_norm == pytest.approx(SQUARED, rel=0.02)
    assert noise.variance == pytest.approx(TRACE / INITIAL, rel=0.02)
    assert noise.scale * INITIAL == pytest.approx(TRACE / SQUARED, rel=0.04)
    assert not noise.biased


def test_gain_and_efficiency_are_those_of_the_formula():
    noise = GradientNoise(2)
    noise.add([3.0, 5.0], [2.0, 4.5], 2, 2.0)
    squared, variance = np.array([1.0, 4.0]), np.array([2.0, 1.0])
    for scale in (1.0, 2.0, 7.5):
        expected = (variance + squared) / (variance / scale + squared)
        assert noise.gains(scale) == pytest.approx(expected)
        assert noise.gain(scale) == pytest.approx((3 + 5) / (3 / scale + 5))
        assert 1 <= noise.gain(scale) <= scale
    assert noise.gain(1.0) == 1.0
    assert noise.gains(1.0).tolist() == [1.0, 1.0]


def test_the_average_keeps_its_share_and_has_no_start_bias():
    noise = GradientNoise(1)
    for value in (1.0, 2.0, 4.0):
        noise.add([3 * value], [2 * value], 2, 4.0)
    keep = 0.999**4
    weights = np.array([keep**2, keep, 1.0])
    assert noise.squared_norm == pytest.approx(np.average([1.0, 2.0, 4.0], weights=weights))


def test_biased_estimates_go_when_there_are_others():
    noise = GradientNoise(1)
    noise.add([9.0], [1.0], 2, 2.0, biased=True)
    assert (noise.biased, noise.estimates) == (True, 1)
    noise.add([3.0], [2.0], 2, 2.0)
    assert (noise.biased, noise.estimates, noise.squared_norm) == (False, 1, 1.0)
    noise.add([9.0], [1.0], 2, 2.0, biased=True)
    assert noise.estimates == 1


def test_nothing_known_and_what_is_not_finite():
    noise = GradientNoise(2)
    noise.add([np.inf, 1.0], [1.0, 1.0], 2, 1.0)
    noise.add([1.0, 1.0], [np.nan, 1.0], 2, 1.0)
    assert not noise.known
    assert noise.gain(4.0) == 1.0
    assert noise.scale == np.inf
    noise.add([1.0, 0.0], [0.25, 0.0], 2, 1.0)  # less than noise alone would leave
    assert noise.squared_norm == 0.0
    assert noise.gains(4.0).tolist() == [4.0, 1.0]


def test_the_state_is_all_of_it():
    noise = GradientNoise(2)
    noise.add([3.0, 5.0], [2.0, 4.5], 2, 2.0, biased=True)
    again = GradientNoise.from_state(noise.state())
    for one in (noise, again):
        one.add([1.0, 2.0], [0.5, 1.5], 2, 2.0, biased=True)
    assert again.state() == noise.state()
    noise.reset()
    assert noise.state() == GradientNoise(2).state()
    with pytest.raises(ValueError, match="2 norms and 1 variances"):
        GradientNoise.from_state({**noise.state(), "variances": [1.0]})


def test_an_estimate_may_stand_for_several_steps():
    once, often = GradientNoise(1), GradientNoise(1)
    for noise in (once, often):
        noise.add([9.0], [3.0], count=2, scale=2.0)
    once.add([5.0], [3.0], count=2, scale=2.0, steps=7)
    for _ in range(7):
        often.add([5.0], [3.0], count=2, scale=2.0)
    assert once.squared_norm == pytest.approx(often.squared_norm)
    assert once.variance == pytest.approx(often.variance)
