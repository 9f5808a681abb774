"""Where the program makes the cache useless, it stops."""

from types import SimpleNamespace

import pytest

from lightning_egeria.caching.stats import COUNTED, LEAST_SERVED, OTHER, STRANGE, Habits

READ = SimpleNamespace(future=SimpleNamespace(done=lambda: True, cancelled=lambda: False), places=range(4))


def batch(hits=4, matches=1, touched=None, lazy=True, checks=(), reads=(READ,), shape=None):
    return SimpleNamespace(
        hits=hits,
        advanced=0,
        samples=4,
        matches=matches,
        was_touched=touched,
        lazy=(lazy,) * 4,
        reads=reads,
        plan=SimpleNamespace(checks=checks),
        other_shape=shape,
    )


def run(habits, count, ran=(), **what):
    """Reasons to stop, for so many batches."""
    front = SimpleNamespace(units=[SimpleNamespace(path="net.a"), SimpleNamespace(path="net.b")], ran=set())
    found = []
    for _ in range(count):
        front.ran = set(ran)
        found.append(habits.why_stop(batch(**what), front))
    return found


def test_served_batches_go_on():
    habits = Habits()
    assert run(habits, 3 * COUNTED) == [None] * 3 * COUNTED
    assert habits.reader is None


@pytest.mark.parametrize(
    ("what", "count", "reason"),
    [
        ({"hits": 0, "matches": 0}, OTHER, "called the frozen layers in another way"),
        ({"hits": 0}, STRANGE, "differed from those of the entries"),
        ({"hits": 0, "shape": (4, 8)}, STRANGE, "had other shapes than the entries"),
        ({"ran": {0, 1}}, COUNTED, "reads the output of 'net.b'"),  # net.a ran for it
    ],
)
def test_habit_that_stops_the_cache(what, count, reason):
    *before, last = run(Habits(), count, **what)
    assert before == [None] * (count - 1)
    assert reason in last


def test_batches_that_could_not_be_served_do_not_count():
    assert run(Habits(), 3 * STRANGE, hits=0, matches=0, reads=()) == [None] * 3 * STRANGE


def test_layers_that_run_for_a_check_are_read_by_nobody():
    assert run(Habits(), 3 * COUNTED, ran=[0], checks=(0, 1)) == [None] * 3 * COUNTED


def test_a_few_samples_now_and_then_do_not_keep_it():
    habits, few = Habits(), int(LEAST_SERVED * STRANGE * 4) - 1
    run(habits, few, hits=1)
    assert "nearly all inputs" in run(habits, STRANGE - few, hits=0)[-1]


def test_a_good_batch_now_and_then_keeps_it():
    habits = Habits()
    for _ in range(10):
        assert run(habits, STRANGE - 2, hits=0)[-1] is None
        assert run(habits, 2, hits=4) == [None, None]


def test_batches_with_few_entries_count_by_these():
    one = SimpleNamespace(future=READ.future, places=range(1))
    assert run(Habits(), 3 * STRANGE, hits=1, reads=(one,)) == [None] * 3 * STRANGE


def test_output_that_is_read_is_seen_without_lazy_inputs():
    assert "reads the output of 'net.a'" in run(Habits(), COUNTED, ran={0}, lazy=False)[-1]


def test_reader_of_most_inputs_is_named():
    habits = Habits()
    run(habits, COUNTED // 2 - 1)
    run(habits, COUNTED // 2 + 1, touched="step (net.py:3)")
    assert habits.reader == "step (net.py:3)"


def test_reader_is_named_behind_a_batch_that_nobody_reads():
    habits = Habits()
    run(habits, COUNTED // 2 + 1, touched="step (net.py:3)")
    run(habits, COUNTED // 2 - 1)
    assert habits.reader == "step (net.py:3)"


def test_reader_of_batches_that_are_over_is_named():
    habits = Habits()
    for _ in range(COUNTED):
        habits.touched(batch(touched="something that keeps it"))
        run(habits, 1)
    assert habits.reader == "something that keeps it"


def test_loaded_batches_are_not_counted():
    habits = Habits()
    run(habits, 3 * COUNTED, touched="step (net.py:3)", lazy=False)
    assert habits.reader is None
