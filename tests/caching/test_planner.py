"""What is loaded for each batch."""

import pytest
from programs.parts import vectors
from streams import recorded

from lightning_egeria.caching.plan import Mode
from lightning_egeria.caching.planner import seed_of


def plans(one, *batches):
    return [one.stream.plan(ids) for ids in batches]


def test_seeds_differ_by_seed_sample_and_view():
    seeds = {seed_of(seed, sample, view) for seed in range(4) for sample in range(4) for view in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_batches_that_are_observed_have_their_inputs(drive):
    one = recorded(drive(observes=lambda ahead: True))
    one.data.loaded.clear()
    assert one.epoch() is not None
    assert sorted(one.data.loaded) == [*range(24)]
    assert (one.stats.hits, one.stats.written) == (0, 24)  # what the front computes of them is kept


def test_ids_that_are_no_indices(drive):
    """A mapping from names, as a sampler of names yields them."""
    table = {f"sample {index}": vectors()[index] for index in range(24)}
    one = recorded(drive(data=table), order=list(table))
    one.epoch(list(table)[::-1])
    assert one.stats.hits == 24


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([[0], [1]], "list objects, which cannot be hashed"), ([f"{n}" for n in range(30)], "more different ids than")],
)
def test_ids_that_cannot_be_numbered(drive, ids, reason):
    with pytest.warns(UserWarning, match=reason):
        assert drive().stream.plan(ids).mode is Mode.PLAIN


def test_trial_comes_first_and_once(drive):
    one = drive()
    one.stream.begin_epoch(0, None, False)
    found = plans(one, [0, 1, 2], [3, 4, 5], [6, 7])
    assert [plan.mode for plan in found] == [Mode.TRIAL, Mode.PLAIN, Mode.PLAIN]


def test_stored_samples_are_left_out(drive):
    one = recorded(drive(), order=[0, 1, 2, 3, 4, 5])
    first, plan = plans(one, [0, 1, 2, 3, 4, 5], [5, 6, 0, 7, 1, 8])
    assert plan.mode is Mode.FOLLOWED
    assert [number >= 0 for number in plan.stored] == [True, False] * 3
    assert (first.checks, plan.checks) == ((0, 1), ())
    assert [number >= 0 for number in first.stored] == [False, False, True, True, True, True]


def test_none_is_left_out_before_some_came_back(drive, monkeypatch):
    monkeypatch.setattr("lightning_egeria.caching.planner.LEAST_RETURNED", 10)
    one = recorded(drive())
    one.epoch()
    assert len(one.data.loaded) == 12  # two batches of six
    assert one.stats.not_loaded == 12


def test_doubtful_samples_are_loaded_at_the_last_look(drive):
    one = recorded(drive(), order=[0, 1, 2, 3, 4, 5])
    _, plan = plans(one, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    one.stream.levels.forget_verified([2, 4], 0)
    assert one.stream.last_look(plan).stored == (0, 0, -1, 0, -1, 0)


def test_views_of_a_sample_have_entries_of_their_own(drive):
    one = drive(views=2)
    found = []
    for epoch in range(3):
        one.stream.begin_epoch(epoch, None, False)
        found.append(one.stream.plan([3, 0]))
    assert [plan.entries for plan in found] == [(6, 0), (7, 1), (6, 0)]
    assert found[0].seeds == found[2].seeds != found[1].seeds
