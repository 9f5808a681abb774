"""The rule against a plain loop from the formulas."""

import numpy as np
import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.selecting.rule import SelectionRule, draw, draw_fixed
from support.selecting import kept_by_a_loop


@pytest.mark.parametrize("beta", [0, 0.5, 1, 3])
@pytest.mark.parametrize("history", [10, 64])
def test_a_plain_loop_keeps_the_same_samples(beta, history):
    data = np.random.default_rng(1)
    batches = [data.exponential(size=size).round(1) for size in (10, 10, 7, 10, 1, 10)]  # rounded: with ties
    rule, generator = SelectionRule(beta, history), np.random.default_rng(2)
    kept = [bool(one) for losses in batches for one in draw(rule.probabilities(losses), generator)]
    numbers = np.random.default_rng(2).random(sum(map(len, batches)))
    assert kept == kept_by_a_loop(batches, numbers, beta, history)
    assert any(kept)
    assert all(kept) == (beta == 0)


@pytest.mark.parametrize(("beta", "share"), [(1, 0.499), (2, 0.333), (3, 0.249)])
def test_the_share_kept_is_that_of_the_paper(beta, share):
    rule, generator = SelectionRule(beta), np.random.default_rng(0)
    data = np.random.default_rng(1)
    kept = [draw(rule.probabilities(data.gamma(2, size=128)), generator).mean() for _ in range(1000)]
    assert np.mean(kept[8:]) == pytest.approx(share, abs=0.005)


def test_equal_losses_have_the_mean_of_their_places():
    assert SelectionRule(beta=1).probabilities(np.full(9, 2.0)).tolist() == [4 / 9] * 9


def test_nan_is_the_largest_loss():
    probabilities = SelectionRule(beta=1).probabilities(np.array([1.0, np.nan, 2.0, 3.0]))
    assert probabilities.tolist() == [0, 0.75, 0.25, 0.5]


def test_an_empty_batch_keeps_nothing():
    assert SelectionRule().probabilities(np.empty(0)).tolist() == []


def test_a_restored_rule_goes_on_as_the_first():
    data = np.random.default_rng(0)
    first, second = SelectionRule(history=20), SelectionRule(history=20)
    first.probabilities(data.random(15))
    second.load_state_dict(first.state_dict())
    losses = data.random(15)
    fresh = SelectionRule(history=20).probabilities(losses)
    expected = first.probabilities(losses)
    assert second.probabilities(losses).tolist() == expected.tolist() != fresh.tolist()


@pytest.mark.parametrize("beta", [-1, -0.01, float("nan"), float("inf")])
def test_a_wrong_beta_is_refused(beta):
    with pytest.raises(ArgumentError, match="beta must be"):
        SelectionRule(beta)


def test_a_history_that_is_too_short_is_refused():
    with pytest.raises(ArgumentError, match="history must be an integer of at least 1"):
        SelectionRule(history=0)
    with pytest.raises(ArgumentError, match="at least the batch size, got 8 and a batch of 9"):
        SelectionRule(history=8).probabilities(np.zeros(9))


def test_losses_of_a_wrong_shape_are_refused():
    with pytest.raises(ArgumentError, match=r"got the shape \(4, 1\)"):
        SelectionRule().probabilities(np.zeros((4, 1)))


def test_fixed_number_follows_the_probabilities():
    generator, weights = np.random.default_rng(0), np.array([0.0, 0.1, 0.3, 0.6])
    counts = np.zeros(4)
    for _ in range(4000):
        rows = draw_fixed(weights, 1, generator)
        counts[rows] += 1
    assert np.abs(counts / 4000 - weights).max() < 0.03
    assert draw_fixed(np.zeros(5), 3, generator).shape == (3,)
    for count in range(1, 5):
        rows = draw_fixed(weights, count, generator)
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert len(rows) == count


def test_only_a_rule_with_a_preference_needs_losses():
    assert SelectionRule(beta=0.5).needs_losses
    assert not SelectionRule(beta=0).needs_losses
