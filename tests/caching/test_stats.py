"""What is counted, and whether the cache pays."""

import types

import pytest

from lightning_egeria.caching import stats
from lightning_egeria.caching.stats import Accounts, CacheStats


def batch(hits=0, advanced=0, samples=4, seconds=0.1, lazy=0, touched=None, eager=False):
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
        waited=0.0,
        eager=eager,
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


@pytest.mark.parametrize(("hit", "pays"), [(0.01, True), (0.3, False)])
def test_whether_it_pays_is_told_once(accounts, hit, pays):
    for _ in range(3):
        assert accounts.judgement() is None
        accounts.count(batch(seconds=0.1))
        accounts.count(batch(hits=4, seconds=hit))
    found, text = accounts.judgement()
    assert found is pays
    assert text == f"a sample takes {hit / 4 * 1e3:.3f} ms from the cache and 25.000 ms without"
    assert accounts.judgement() is None


def test_trials_and_mixed_batches_are_not_compared(accounts):
    for _ in range(5):
        accounts.count(batch(hits=4))
        accounts.count(batch(eager=True))
        accounts.count(batch(hits=2))
        accounts.count(batch(advanced=4))
    assert accounts.judgement() is None


def test_seconds_saved_are_hits_by_the_difference():
    found = CacheStats()
    accounts = Accounts(found)
    accounts.count(batch(seconds=0.4))
    accounts.count(batch(hits=4, seconds=0.1))
    assert found.seconds_saved == pytest.approx(0.3)


def test_another_boundary_is_compared_anew(accounts):
    for _ in range(3):
        accounts.count(batch())
        accounts.count(batch(hits=4))
    assert accounts.judgement() is not None
    accounts.restart()
    assert accounts.judgement() is None


def test_inputs_that_are_read_late_were_loaded_after_all():
    found = CacheStats()
    accounts = Accounts(found)
    one = batch(hits=4, lazy=3)
    accounts.count(one)
    accounts.touched_late(one)
    assert (found.not_loaded, found.loaded_after_all) == (0, 3)


def test_loading_after_all_is_time_that_was_not_saved(monkeypatch):
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(stats, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    found = CacheStats(seconds_saved=2.0)
    with Accounts(found).loading():
        pass
    assert found.seconds_saved == 1.5
