"""What is counted, and whether the cache pays."""

import types

import pytest
import torch
from races import Clock

from lightning_egeria.caching import stats
from lightning_egeria.caching.stats import RACES, Accounts, CacheStats
from lightning_egeria.profiling.race import TURN

CPU = torch.device("cpu")


def batch(hits=0, advanced=0, samples=4, seconds=0.1, lazy=0, touched=None, eager=False, waited=0.0, entries=0):
    lazies = tuple(at < lazy for at in range(samples))
    return types.SimpleNamespace(
        hits=hits,
        advanced=advanced,
        samples=samples,
        lazy=lazies,
        was_touched=touched,
        is_timed=True,
        began=10.0,
        ended=10.0 + seconds,
        waited=waited,
        eager=eager,
        reads=[types.SimpleNamespace(places=range(entries))],
    )


@pytest.fixture
def accounts(monkeypatch):
    monkeypatch.setattr(stats, "COMPARED_STEPS", 3)
    return Accounts(CacheStats())


def test_samples_are_counted():
    found = CacheStats()
    accounts = Accounts(found)
    accounts.count(batch(hits=3, advanced=1, lazy=4))
    accounts.count(batch(lazy=2, touched="step"))
    assert (found.hits, found.advanced, found.misses) == (3, 1, 4)
    assert (found.not_loaded, found.loaded_after_all) == (4, 2)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def judged(accounts, hit=0.01):
    """What is judged after three batches of each kind."""
    for _ in range(3):
        assert accounts.judgement(CPU) is None
        accounts.count(batch(seconds=0.1, waited=0.5))
        accounts.count(batch(hits=4, seconds=hit))
    return accounts.judgement(CPU)


def test_slow_entries_do_not_pay_and_it_is_told_once(accounts):
    found = judged(accounts, hit=0.9)
    assert found == (False, "a sample takes 225.000 ms from the cache and 150.000 ms without")
    assert accounts.judgement(CPU) is None


@pytest.mark.parametrize(("cached", "pays"), [(0.01, True), (0.3, False)])
def test_whole_steps_decide_whether_it_pays(accounts, clock, cached, pays):
    assert judged(accounts) is None
    assert accounts.race.is_on
    assert clock.race(accounts.race, cached, plain=0.1) == TURN
    assert not accounts.race.is_on
    found, text = accounts.judgement(CPU)
    assert (found, text) == (pays, f"a step takes {cached * 1e3:.1f} ms with it and 100.0 ms without")
    assert accounts.judgement(CPU) is None


def test_what_was_saved_is_what_whole_steps_say(clock, monkeypatch):
    monkeypatch.setattr(stats, "COMPARED_STEPS", 3)
    found = CacheStats()
    accounts = Accounts(found)
    judged(accounts)
    clock.race(accounts.race, cached=0.02, plain=0.1)
    accounts.judgement(CPU)
    assert found.seconds_saved == pytest.approx(3 * 0.08)
    accounts.count(batch(hits=4, seconds=0.01))
    assert found.seconds_saved == pytest.approx(4 * 0.08)


@pytest.mark.parametrize(("ahead", "plain"), [(False, 110.0), (True, 600.0)])
def test_workers_that_loaded_ahead_do_not_shorten_the_wait(accounts, clock, ahead, plain):
    accounts.loads_ahead = ahead
    judged(accounts)
    clock.race(accounts.race, cached=0.2, plain=0.1, wait=0.01)
    _, text = accounts.judgement(CPU)
    assert text == f"a step takes 210.0 ms with it and {plain} ms without"


def test_too_few_whole_steps_leave_it_to_samples(accounts, clock):
    assert judged(accounts) is None
    for _ in range(RACES):
        assert accounts.judgement(CPU) is None
        clock.race(accounts.race, cached=0.3, plain=0.1, serves=False)
    assert accounts.judgement(CPU) == (True, "a sample takes 2.500 ms from the cache and 150.000 ms without")


def test_samples_without_the_cache_that_are_few_tell_nothing(accounts, clock):
    """It does not pay, nor does it not."""
    for _ in range(3):
        accounts.count(batch(hits=4, seconds=0.9))
    accounts.count(batch(seconds=0.1))
    for _ in range(RACES):
        assert accounts.judgement(CPU) is None
        clock.race(accounts.race, cached=0.3, plain=0.1, serves=False)
    assert accounts.judgement(CPU) is None


def test_whole_steps_need_no_misses(accounts, clock):
    """Which are few if an epoch is short."""
    found = CacheStats()
    accounts = Accounts(found)
    for _ in range(3):
        accounts.count(batch(hits=4, seconds=0.01))
    assert accounts.judgement(CPU) is None
    clock.race(accounts.race, cached=0.3, plain=0.1)
    assert accounts.judgement(CPU) == (False, "a step takes 300.0 ms with it and 100.0 ms without")
    assert found.seconds_saved == pytest.approx(3 * -0.2)


def test_entries_that_do_not_fit_are_work_of_the_cache(clock, monkeypatch):
    """Even if no batch comes whole from the cache."""
    monkeypatch.setattr(stats, "COMPARED_STEPS", 3)
    found = CacheStats()
    accounts = Accounts(found)
    for _ in range(3):
        assert accounts.judgement(CPU) is None
        accounts.count(batch(hits=2, entries=4, seconds=0.01))
    assert accounts.judgement(CPU) is None
    clock.race(accounts.race, cached=0.3, plain=0.1)
    assert accounts.judgement(CPU) == (False, "a step takes 300.0 ms with it and 100.0 ms without")
    assert (found.hits, found.misses) == (6, 6)
    assert found.seconds_saved == pytest.approx(3 * -0.2)


def test_steps_that_have_become_others_race_again(accounts, clock):
    judged(accounts)
    clock.race(accounts.race, cached=0.3, plain=0.1)
    accounts.race_again()
    assert accounts.judgement(CPU) is None
    clock.race(accounts.race, cached=0.05, plain=0.1)
    assert accounts.judgement(CPU) == (True, "a step takes 50.0 ms with it and 100.0 ms without")


def test_trials_and_mixed_batches_are_not_compared(accounts):
    for _ in range(5):
        accounts.count(batch(hits=4))
        accounts.count(batch(eager=True))
        accounts.count(batch(hits=2))
        accounts.count(batch(advanced=4))
    assert accounts.judgement(CPU) is None


def test_seconds_saved_are_hits_by_the_difference():
    found = CacheStats()
    accounts = Accounts(found)
    accounts.count(batch(seconds=0.4))
    accounts.count(batch(hits=4, seconds=0.1))
    assert found.seconds_saved == pytest.approx(0.3)


def test_another_boundary_is_compared_anew(accounts):
    assert judged(accounts, hit=0.9) is not None
    accounts.restart()
    assert judged(accounts, hit=0.9) is not None


def test_inputs_that_are_read_late_were_loaded_after_all():
    found = CacheStats()
    accounts = Accounts(found)
    one = batch(hits=4, lazy=3)
    accounts.count(one)
    accounts.touched_late(one)
    assert (found.not_loaded, found.loaded_after_all) == (0, 3)


def test_time_that_the_cache_spends_is_not_saved(monkeypatch):
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(stats, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    found = CacheStats(seconds_saved=2.0)
    with Accounts(found).spending():
        pass
    assert found.seconds_saved == 1.5


def test_entries_that_did_not_fit_are_counted():
    found = CacheStats()
    accounts = Accounts(found)
    for one in (batch(), batch(hits=2, advanced=1, entries=3), batch(hits=1, entries=3), batch(entries=4)):
        accounts.count(one)
    assert (found.unused, found.misses) == (2 + 4, 4 + 1 + 3 + 4)
