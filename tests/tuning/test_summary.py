"""Golden summaries of made-up traces, worked out by hand."""

import math

import pytest

from lightning_egeria.methods.tuning.summary import Label, summarize, window_means

NAN = math.nan

GOLDEN = {
    # Ten windows of two losses each fall from 2.0 to 1.1 by 0.1: no rise.
    "converging": ([2 - 0.1 * (i // 2) for i in range(20)], 20, (-0.9, 0.0, 0.045, Label.CONVERGING)),
    # The noise is exactly a tenth of the range: it still converges.
    "just converging": ([3.0, 3.125, 1.75], 3, (-1.25, 0.125, 0.375, Label.CONVERGING)),
    "unstable": ([3.0, 1.0, 2.0], 3, (-1.0, 1.0, 0.0, Label.UNSTABLE)),
    "rising": ([1.0, 1.5, 2.0], 3, (1.0, 0.5, 0.0, Label.UNSTABLE)),
    "flat": ([1.0] * 40, 40, (0.0, 0.0, 0.0, Label.UNSTABLE)),
    "one window": ([1.5], 1, (0.0, 0.0, 0.0, Label.UNSTABLE)),
    "diverged": ([1.0, 11.0], 2, (10.0, 10.0, 0.0, Label.DIVERGED)),
    "diverged and back": ([1.0, 10.5, 0.5], 3, (-0.5, 9.5, 0.0, Label.DIVERGED)),
    "ten times is not more": ([1.0, 10.0], 2, (9.0, 9.0, 0.0, Label.UNSTABLE)),
    "a negative start": ([-1.0, -5.0], 2, (-4.0, 0.0, 2.0, Label.CONVERGING)),
    "in seconds": ([4.0, 2.0], 0.5, (-2.0, 0.0, 4.0, Label.CONVERGING)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_summary(name):
    losses, cost, (change, noise, speed, label) = GOLDEN[name]
    summary = summarize(losses, cost)
    assert (summary.range, summary.noise, summary.speed) == pytest.approx((change, noise, speed), abs=1e-12)
    assert summary.label is label


def test_rounding_is_no_progress():
    summary = summarize([1.25, 1.25 - 1e-7], 2)
    assert (summary.speed, summary.label) == (0.0, Label.UNSTABLE)
    assert summarize([-1.25, -1.25 - 1e-4], 2).label is Label.CONVERGING


@pytest.mark.parametrize("losses", [[], [1.0, NAN], [math.inf], [1.0] * 50 + [-math.inf]])
def test_a_loss_that_is_not_finite_has_diverged(losses):
    summary = summarize(losses, 1)
    assert (summary.label, summary.speed) == (Label.DIVERGED, 0.0)


def test_an_explosion_in_the_first_window_is_no_progress():
    doubled = [2.3, 15.0, 15.0, 9.0, 6.0, 4.0, 3.0, 2.6, 2.5, 2.4, *[2.3] * 10]
    assert summarize(doubled, 20).speed > 0.1
    summary = summarize(doubled, 20, start=2.3)
    assert (summary.speed, summary.label) == (0.0, Label.UNSTABLE)
    assert summarize([2.3, 2.0, 1.0], 3, start=2.3).label is Label.CONVERGING


def test_relative_losses_lose_no_noise():
    noisy = [3.0, 1.0, 2.0]
    assert (summarize(noisy, 4).gain, summarize(noisy, 4).speed) == (0.0, 0.0)
    assert (summarize(noisy, 4, start=3.0).gain, summarize(noisy, 4, start=3.0).speed) == (1.0, 0.25)


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 105])
def test_windows_cover_every_loss_once(count):
    means = window_means([float(i) for i in range(count)])
    assert len(means) == min(10, count)
    assert means == sorted(means)
    lengths = [count * (k + 1) // len(means) - count * k // len(means) for k in range(len(means))]
    assert sum(mean * length for mean, length in zip(means, lengths, strict=True)) == pytest.approx(sum(range(count)))
    assert max(lengths) - min(lengths) <= 1
