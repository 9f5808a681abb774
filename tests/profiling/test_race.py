"""Whole steps with something and without it, in turns."""

import types

import pytest
import torch

from lightning_egeria.core.profiling import race as racing
from lightning_egeria.core.profiling.race import LEAST_STEPS, TURN, TURNS, Race

CPU = torch.device("cpu")


class Clock:
    """A clock that moves when it is told."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(racing, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def race(self, race, cached, plain, wait=0.0, serves=True, batches=range(2 * TURNS * TURN + 4)):
        """Have batches come one after the other, with and without the cache in turns; return how many had none."""
        count = 0
        for number in batches:
            is_plain = race.takes(number)
            count += is_plain
            self.now += wait
            race.arrived(number, wait)
            if not is_plain and serves:
                race.served()
            self.now += plain if is_plain else cached
        return count


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_waits_of_before_the_race_do_not_count(clock):
    race = Race()
    for _ in range(100):
        race.served()
    race.begin(CPU)
    clock.race(race, cached=0.2, plain=0.1, wait=0.5)
    assert race.seconds(0.0) == (pytest.approx(0.7), pytest.approx(0.6))


def test_steps_that_are_compared_follow_one_of_their_kind(clock):
    race = Race()
    race.begin(CPU)
    race.takes(0)
    race.arrived(0, 0.0)
    clock.now += 100  # the first step of a turn
    clock.race(race, cached=0.2, plain=0.1, batches=range(1, 30))
    assert race.seconds(0.0) == (pytest.approx(0.2), pytest.approx(0.1))


@pytest.mark.parametrize(("odd", "turns"), [((), 1), ((3,), 1), ((2, 3, 4), TURNS), ((11, 12, 13), TURNS)])
def test_a_second_turn_where_the_first_is_not_clear(clock, odd, turns):
    race = Race()
    race.begin(CPU)
    found = []
    for number in range(5 * TURN):
        fast = number in odd  # another kind of step than its turn
        found.append(clock.race(race, cached=1.1 if fast else 0.1, plain=0.05 if fast else 1.0, batches=[number]))
    assert sum(found) == turns * TURN
    assert not race.is_on
    assert race.seconds(0.0) == (pytest.approx(0.1), pytest.approx(1.0))


def test_time_between_two_passes_is_no_step(clock):
    race = Race()
    race.begin(CPU)
    for number in range(2 * TURNS * TURN + 4):
        race.new_pass()
        clock.race(race, cached=0.2, plain=0.1, batches=[number])
    assert race.seconds(0.0) is None


def test_race_that_has_not_begun_takes_no_batch(clock):
    race = Race()
    assert clock.race(race, cached=0.2, plain=0.1) == 0
    assert race.seconds(0.0) is None
    assert LEAST_STEPS <= TURNS * (TURN - 1)
