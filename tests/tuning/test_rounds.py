"""A search on traces that are known."""

import itertools
import math

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.rounds import Limits, Result, search
from lightning_egeria.methods.tuning.searchers import CompassSearcher, GridSearcher, RandomSearcher
from lightning_egeria.methods.tuning.spaces import Choice, LogUniform
from lightning_egeria.methods.tuning.summary import Label


class Listed:
    """Asks for the learning rates of a list, and keeps what it is told."""

    def __init__(self, *rates):
        self.rates, self.score = list(rates), []

    def ask(self):
        return {"lr": self.rates.pop(0)} if self.rates else None

    def tell(self, setting, speed):
        self.score.append((setting["lr"], speed))


def play(run, results):
    """Run a search whose results are known, by setting (its ``repr``) and steps; returns its orders and outcome."""
    orders = []
    try:
        order = next(run)
        while True:
            orders.append(order)
            order = run.send(results[repr(order.setting), order.steps])
    except StopIteration as end:
        return orders, end.value


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
    """A loss that falls by its rate in each step."""
    return [100 - rate * i for i in range(steps)]


def ran(rates, losses=falling, present=0.0, **limits):
    searcher = Listed(*rates)
    chosen = Limits(**{"first_steps": 4, "most_steps": 64, "most_trials": 50} | limits)
    orders, outcome = play(search(searcher, {"lr": present}, chosen), Traces(losses))
    return [(order.branch, order.setting["lr"], order.steps) for order in orders], outcome, searcher, orders


def test_the_faster_half_goes_on_for_as_long_again():
    orders, outcome, searcher, _ = ran([3.0, 1.0, 4.0, 2.0, 5.0], present=0.5)
    first = [(0, 0.5, 4), (1, 3.0, 4), (2, 1.0, 4), (3, 4.0, 4), (4, 2.0, 4), (5, 5.0, 4)]
    assert orders == [*first, (5, 5.0, 8), (3, 4.0, 8), (1, 3.0, 8), (5, 5.0, 16), (3, 4.0, 16)]
    assert (outcome.winner, outcome.trial_steps, outcome.reason) == (5, 16, "6 settings were compared")
    assert [rate for rate, _ in searcher.score] == [0.5, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_no_trial_is_longer_than_allowed():
    orders, outcome, *_ = ran([3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 7.0, 8.0], most_steps=7)
    assert {steps for *_, steps in orders} == {4, 7}
    assert outcome.branches[outcome.winner].setting == {"lr": 8.0}


def test_longer_trials_tell_more_than_shorter_ones():
    """A rate that is too large falls fast, and then no more."""

    def losses(rate, steps):
        return [100 - rate * min(i, 2 if rate > 4 else i) for i in range(steps)]

    _, outcome, *_ = ran([1.0, 3.0, 9.0, 2.0, 4.0, 10.0, 0.5], losses)
    assert outcome.branches[outcome.winner].setting == {"lr": 4.0}
    assert [branch.steps for branch in outcome.branches] == [4, 4, 8, 8, 4, 16, 16, 4]


def test_trials_too_short_to_show_progress_get_longer():
    """With a warm-up, say. None is left behind for that."""

    def losses(rate, steps):
        return [100 - rate * max(0, i - 10) + (i < 10) * i for i in range(steps)]

    orders, outcome, *_ = ran([1.0, 2.0, 3.0], losses, present=0.5)
    assert [branch for branch, _, steps in orders if steps == 8] == [0, 1, 2, 3]
    assert outcome.branches[outcome.winner].setting == {"lr": 3.0}


def test_where_all_diverge_a_shorter_trial_wins():
    def losses(rate, steps):
        return [math.nan] * steps if rate > 2 and steps > 4 else falling(rate, steps)

    _, outcome, *_ = ran([1.0, 3.0, 2.0, 5.0], losses, present=0.5)
    assert outcome.branches[outcome.winner].setting == {"lr": 2.0}
    assert [branch.steps for branch in outcome.branches] == [4, 4, 8, 8, 8]


def test_states_that_may_go_on_are_needed():
    *_, orders = ran([3.0, 2.0, 4.0], present=1.0)
    needed = [order.needed for order in orders]
    # Two of up to 50 settings may go on, then two of four, then the other one of these.
    assert needed[:4] == [(), (0,), (1, 0), (1, 2, 0)]
    assert needed[4:] == [(1,), (3,)]


def test_as_many_settings_as_the_steps_allow():
    endless = itertools.count(1)
    rates = [next(endless) * 0.001 for _ in range(80)]
    _, outcome, *_ = ran(list(rates), most_trials=7)
    assert len(outcome.branches) == 7
    orders, outcome, *_ = ran(list(rates), most_total=100)
    lengths = {branch: steps for branch, _, steps in orders}
    assert sum(lengths.values()) == sum(branch.steps for branch in outcome.branches)
    assert sum(lengths.values()) == 8 * 4 + 4 * 4 + 2 * 8  # a ninth one would take 112
    assert outcome.reason == "8 settings were compared"


def warming_up(rate, steps):
    """A rate that is too large falls fast, and then no more."""
    return [100 - (100 * rate) * min(i, 6 / (100 * rate) ** 1.2) for i in range(steps)]


def refined(**limits):
    searcher = CompassSearcher({"lr": LogUniform(1e-4, 1)})
    chosen = Limits(**{"first_steps": 4, "most_steps": 32, "most_trials": 50} | limits)
    orders, outcome = play(search(searcher, {"lr": 1e-4}, chosen), Traces(warming_up))
    return [(order.setting["lr"], order.steps, order) for order in orders], outcome


def test_a_compass_looks_around_the_fastest_of_each_round():
    """In 32 steps a smaller rate is fastest than in four. The first round does not try it."""
    orders, outcome = refined()
    first, last = ([rate for rate, length, _ in orders if length == steps] for steps in (4, 32))
    early = min(first, key=lambda rate: warming_up(rate, 4)[-1])
    late = min(last, key=lambda rate: warming_up(rate, 32)[-1])
    assert early > 5 * late
    assert outcome.branches[outcome.winner].setting == {"lr": late}
    assert late not in first


def test_a_round_leaves_the_later_ones_their_share():
    orders, outcome = refined(most_total=120)
    last = {order.branch: steps for _, steps, order in orders}
    assert sum(last.values()) <= 120
    assert max(last.values()) == 32
    assert outcome.branches[outcome.winner].steps == 32


@pytest.mark.parametrize("most_total", [*range(60, 300, 7)])
def test_a_refining_search_ends_with_a_comparison(most_total):
    """The longest trials are two at least: one alone would win whatever it is."""
    _, outcome = refined(most_total=most_total)
    steps = [branch.steps for branch in outcome.branches if branch.speed > 0]
    assert sum(branch.steps for branch in outcome.branches) <= most_total
    assert steps.count(max(steps)) > 1


def test_states_of_a_round_that_refines_are_needed():
    """Any branch that goes on has been needed at all times since its last steps."""
    orders, _ = refined()
    for number, (_, _, order) in enumerate(orders):
        before = [at for at, (*_, other) in enumerate(orders[:number]) if other.branch == order.branch]
        if before:
            assert all(order.branch in other.needed for *_, other in orders[before[-1] + 1 : number])


def test_no_trial_is_beyond_what_the_search_may_spend():
    """Not even of the present setting, where none makes progress."""

    def losses(rate, steps):
        return [1.0] * steps

    orders, outcome, *_ = ran([1.0, 2.0], losses, most_total=18)
    assert orders == [(0, 0.0, 4), (1, 1.0, 4), (0, 0.0, 8), (1, 1.0, 8)]
    assert outcome.reason == "16 steps of trials were used up"


def test_a_setting_of_other_tunables_is_refused():
    class Confused(Listed):
        def ask(self):
            return {"lr": 1.0, "wd": 2.0}

    with pytest.raises(ArgumentError, match=r"the searcher returned .*'wd': 2.0.*, expected values of lr"):
        play(search(Confused(), {"lr": 0.5}, Limits(4, 64, 50)), Traces(falling))


def test_settings_are_copied():
    one = {}

    class Reuses(Listed):
        def ask(self):
            one.update(super().ask() or {})
            return one if len(self.score) < 3 else None

    _, outcome = play(search(Reuses(1.0, 2.0), {"lr": 0.5}, Limits(4, 64, 50)), Traces(falling))
    assert [branch.setting["lr"] for branch in outcome.branches] == [0.5, 1.0, 2.0]


def test_too_few_steps_for_two_trials():
    orders, outcome, *_ = ran([0.001], most_total=1)
    assert orders == [(0, 0.0, 4)]  # the first trial is never too long
    assert outcome.reason == "4 steps of trials were used up"


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
    assert dict(searcher.score)[9] == dict(searcher.score)[7] == -1.0
    assert outcome.winner not in (1, 2)


def test_without_progress_there_is_no_winner():
    _, outcome, *_ = ran([1, 2], lambda rate, steps: [1 + rate * i for i in range(steps)])
    assert outcome.winner is None


@pytest.mark.parametrize("halving", [True, False])
def test_a_present_setting_that_diverges_is_left(halving):
    def losses(rate, steps):
        return [math.nan] * steps if rate in (0, 3) else [1 + rate * i for i in range(steps)]

    _, outcome, *_ = ran([2, 1, 3], losses, halving=halving)
    assert outcome.branches[outcome.winner].setting == {"lr": 1}
    _, outcome, *_ = ran([3], losses, halving=halving)
    assert outcome.winner is None


def test_one_setting_has_one_trial():
    orders, outcome, *_ = ran([])
    assert orders == [(0, 0.0, 4)]
    assert outcome.reason == "there is one setting"


def test_the_present_setting_is_not_tried_twice():
    orders, _, searcher, _ = ran([0.0, 1.0])
    assert [rate for _, rate, _ in orders] == [0.0, 1.0]
    assert searcher.score == [(0.0, 0.0), (0.0, 0.0), (1.0, pytest.approx(3 / 4))]  # once unasked, once as the answer


# A later search: each setting has one trial.


def test_later_each_setting_has_one_trial():
    orders, outcome, *_ = ran([3.0, 2.0, 1.0], halving=False)
    assert orders == [(0, 0.0, 4), (1, 3.0, 4), (2, 2.0, 4), (3, 1.0, 4)]
    assert (outcome.winner, outcome.trial_steps, outcome.reason) == (1, 4, "nothing was left to try")


def test_later_the_state_of_the_best_is_needed():
    *_, orders = ran([3.0, 2.0, 4.0, 1.0], halving=False, present=0.5)
    assert [order.needed for order in orders] == [(), (0,), (1,), (1,), (3,)]


def test_later_it_ends_when_the_five_best_agree():
    rates = [1.0, 1.01, 0.2, 1.02, 0.98, 0.97, 5.0]
    _, outcome, *_ = ran(rates, halving=False)
    assert outcome.reason == "the 5 best speeds differ by less than 10%"
    assert [branch.setting["lr"] for branch in outcome.branches] == [0.0, *rates[:6]]


def test_later_limits_hold():
    orders, outcome, *_ = ran([1.2**i for i in range(80)], halving=False, most_total=50)
    assert [steps for *_, steps in orders] == [4] * 12
    assert outcome.reason == "48 steps of trials were used up"
    _, outcome, *_ = ran([1.2**i for i in range(80)], halving=False, most_trials=3)
    assert len(outcome.branches) == 3


@pytest.mark.parametrize("kind", [CompassSearcher, RandomSearcher, GridSearcher])
@pytest.mark.parametrize("halving", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_any_search_ends_and_the_fastest_wins(kind, halving, seed):
    spaces = {"lr": LogUniform(1e-4, 10), "other": Choice([1, 2])}
    limits = Limits(2, 40, 15, 300, halving)
    run = search(kind(spaces, seed), {"lr": 1e-3, "other": 1}, limits)
    _, outcome = play(run, Traces(falling))
    speeds = [branch.speed for branch in outcome.branches]
    assert all(branch.steps > 0 for branch in outcome.branches)
    assert len(speeds) <= 15
    longest = max(branch.steps for branch in outcome.branches if branch.speed > 0)
    assert speeds[outcome.winner] == max(branch.speed for branch in outcome.branches if branch.steps == longest)
