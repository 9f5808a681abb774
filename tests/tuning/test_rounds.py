"""A search on traces that are known."""

import itertools
import math

import pytest

from lightning_egeria.tuning.rounds import Limits, Result, play, search
from lightning_egeria.tuning.searchers import GridSearcher, RandomSearcher
from lightning_egeria.tuning.spaces import Choice, LogUniform
from lightning_egeria.tuning.summary import Label


class Listed:
    """Asks for the learning rates of a list, and keeps what it is told."""

    def __init__(self, *rates):
        self.rates, self.told = list(rates), []

    def ask(self):
        return {"lr": self.rates.pop(0)} if self.rates else None

    def tell(self, setting, speed):
        self.told.append((setting["lr"], speed))


class Traces(dict):
    """Makes the result of any setting and length."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def __getitem__(self, key):
        setting, steps = key
        rate = eval(setting)["lr"]
        made = self.losses(rate, steps)
        return made if isinstance(made, Result) else Result(made, steps)


def falling(rate, steps):
    """A loss that falls by its rate in each step; noise hides that from short trials unless the rate is large."""
    return [100 - rate * i + (0.5 if i % 2 else 0) for i in range(steps)]


def ran(rates, losses=falling, present=0.0, **limits):
    searcher = Listed(*rates)
    chosen = Limits(**{"first_steps": 4, "most_steps": 64, "most_trials": 50} | limits)
    orders, outcome = play(search(searcher, {"lr": present}, chosen), Traces(losses))
    return [(order.branch, order.setting["lr"], order.steps) for order in orders], outcome, searcher, orders


def test_steps_double_until_a_branch_converges():
    orders, outcome, searcher, _ = ran([0.05, 0.5, 0.1])
    # Rates of 0 and 0.05 vanish in noise of 0.5. At 0.5, windows of one loss each do not converge either; at 2 they do.
    assert orders[:6] == [(0, 0.0, 4), (0, 0.0, 8), (1, 0.05, 8), (0, 0.0, 16), (1, 0.05, 16), (2, 0.5, 16)]
    lengths = [steps for branch, _, steps in orders if branch == 0]
    assert lengths == [4 * 2**n for n in range(len(lengths))]
    assert outcome.branches[outcome.winner].setting == {"lr": 0.5}
    assert outcome.reason == "every setting was tried"
    assert [rate for rate, _ in searcher.told] == [0.05, 0.5, 0.1]


def test_the_present_setting_alone_does_not_end_doubling():
    """From a rate that is far too small the loss falls steadily; better ones begin with a rise."""

    def losses(rate, steps):
        if rate == 0.1:
            return [100 - 0.1 * step for step in range(steps)]
        return [100 + (3 * step if step < 4 else 16 - rate * step) for step in range(steps)]

    orders, outcome, *_ = ran([2.0, 1.0], losses, present=0.1)
    assert [steps for branch, _, steps in orders if branch == 0] == [4, 8, 16, 32, 64]
    assert outcome.branches[outcome.winner].setting == {"lr": 2.0}


def test_after_that_each_setting_has_one_trial():
    orders, outcome, *_ = ran([3.0, 2.0, 1.0], lambda rate, steps: [100 - rate * i for i in range(steps)])
    assert orders == [(0, 0.0, 4), (0, 0.0, 8), (1, 3.0, 8), (2, 2.0, 8), (3, 1.0, 8)]
    assert (outcome.winner, outcome.trial_steps) == (1, 8)


def test_states_of_the_best_and_the_growing_are_needed():
    *_, orders = ran([3.0, 2.0, 4.0], lambda rate, steps: [100 - rate * i for i in range(steps)])
    assert [order.needed for order in orders] == [(), (), (0,), (1,), (1,)]


def test_it_ends_when_the_five_best_agree():
    rates = [1.0, 1.01, 0.2, 1.02, 0.98, 0.97, 5.0]
    _, outcome, *_ = ran(rates, lambda rate, steps: [100 - rate * i for i in range(steps)])
    assert outcome.reason == "the 5 best speeds differ by less than 10%"
    assert [branch.setting["lr"] for branch in outcome.branches] == [0.0, *rates[:6]]


def test_diverged_and_failed_branches_get_no_more_steps():
    def losses(rate, steps):
        if rate == 9:
            return [math.nan] * steps
        if rate == 7:
            return Result([], steps, "out of memory")
        return falling(rate, steps)

    orders, outcome, searcher, _ = ran([9, 7, 0.01, 0.02], losses, most_steps=32)
    assert [branch for branch, *_ in orders].count(1) == 1
    assert [branch for branch, *_ in orders].count(2) == 1
    assert [outcome.branches[number].label for number in (1, 2)] == [Label.DIVERGED, Label.FAILED]
    assert dict(searcher.told)[9] == dict(searcher.told)[7] == 0.0
    assert outcome.winner not in (1, 2)


def test_without_progress_there_is_no_winner():
    _, outcome, *_ = ran([1, 2], lambda rate, steps: [1 + rate * i for i in range(steps)])
    assert outcome.winner is None


def test_one_setting_has_one_trial():
    orders, outcome, *_ = ran([])
    assert orders == [(0, 0.0, 4)]
    assert outcome.reason == "there is one setting"


def test_the_present_setting_is_not_tried_twice():
    orders, _, searcher, _ = ran([0.0, 1.0], lambda rate, steps: [9 - rate * i for i in range(steps)])
    assert [rate for _, rate, _ in orders] == [0.0, 0.0, 1.0]
    assert searcher.told == [(0.0, 0.0), (1.0, pytest.approx(7 / 8))]


def test_limits_hold():
    endless = itertools.count(1)
    _, outcome, *_ = ran([next(endless) * 0.001 for _ in range(80)], most_trials=7)
    assert len(outcome.branches) == 7
    orders, outcome, *_ = ran([0.001] * 80, most_total=100)
    lengths = {branch: steps for branch, _, steps in orders}
    assert sum(lengths.values()) == sum(branch.steps for branch in outcome.branches) <= 100
    assert outcome.reason.endswith("steps of trials were used up")
    orders, *_ = ran([0.001], most_total=1)
    assert orders[0] == (0, 0.0, 4)  # the first trial is never too long


@pytest.mark.parametrize("kind", [RandomSearcher, GridSearcher])
@pytest.mark.parametrize("doubling", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_any_search_ends_and_the_fastest_wins(kind, doubling, seed):
    spaces = {"lr": LogUniform(1e-4, 10), "other": Choice([1, 2])}
    limits = Limits(2, 40, 15, 300, doubling)
    run = search(kind(spaces, seed), {"lr": 1e-3, "other": 1}, limits)
    _, outcome = play(run, Traces(falling))
    speeds = [branch.speed for branch in outcome.branches]
    assert all(branch.steps > 0 for branch in outcome.branches)
    assert len(speeds) <= 15
    assert outcome.winner is None or speeds[outcome.winner] == max(speeds)
    assert (outcome.winner is None) == (max(speeds) == 0)
