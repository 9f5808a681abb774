"""JigSaw: nothing overlaps, no gang is split, no floor is broken, and gaps are filled."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduling.iterations import IterationCost, IterationJob, ceiling, run_gangs
from benchmarks.scheduling.jigsaw import Progress, plan_round, run_rounds
from lightning_egeria.errors import SchedulingError

DEVICES = 4


@st.composite
def all_jobs(draw):
    jobs = []
    for number in range(draw(st.integers(1, 6))):
        steps = draw(st.lists(st.floats(0.1, 2), min_size=1, max_size=5))
        memory = sorted(draw(st.lists(st.floats(0.1, 1), min_size=len(steps), max_size=len(steps))))
        cost = IterationCost(tuple(itertools.accumulate(steps)), tuple(memory))
        floor = draw(st.floats(1 / len(steps), 1))
        gang, iterations = draw(st.integers(1, DEVICES)), draw(st.integers(1, 60))
        jobs.append(IterationJob(f"{number}", draw(st.floats(0, 30)), gang, iterations, cost, floor))
    return jobs


@settings(deadline=None)
@given(all_jobs(), st.floats(0, 3))
def test_a_round_breaks_no_device_gang_or_memory(jobs, credit):
    progress = {job.name: Progress(job.iterations, credit) for job in jobs}
    length, turns = plan_round(jobs, progress, DEVICES)
    assert turns
    for turn in turns:
        assert len(set(turn.devices)) == turn.job.gang
        assert 0 <= turn.start < turn.end <= length + 1e-6
        assert 1 <= turn.depth <= turn.job.cost.depths
    for device in range(DEVICES):
        here = sorted((turn for turn in turns if device in turn.devices), key=lambda turn: turn.start)
        assert all(first.end <= second.start + 1e-6 for first, second in itertools.pairwise(here))
        deepest = {job.name: max((turn.depth for turn in here if turn.job is job), default=0) for job in jobs}
        assert sum(job.cost.memory[deepest[job.name] - 1] for job in jobs if deepest[job.name]) <= 1 + 1e-6
    for job in jobs:
        own = [turn for turn in turns if turn.job is job]
        assert len(own) <= job.iterations
        assert len({tuple(turn.devices) for turn in own}) <= 1
        assert credit + sum(turn.depth - job.least_depth for turn in own) >= -1e-6


@settings(deadline=None)
@given(all_jobs())
def test_every_job_ends_above_its_floor_and_below_the_ceiling(jobs):
    run = run_rounds(jobs, DEVICES)
    for job in jobs:
        assert run.ended[job.name] >= job.arrival_s + job.iterations * job.cost.seconds[0] * (1 - 1e-9)
        assert run.mean_depth[job.name] >= job.floor - 1e-6
    assert run.efficiency <= ceiling(jobs) * (1 + 1e-6)
    assert run_gangs(jobs, DEVICES).efficiency <= ceiling(jobs) * (1 + 1e-6)


def test_a_job_alone_runs_without_a_gap():
    cost = IterationCost((1.0, 2.0), (0.5, 0.5))
    run = run_rounds([IterationJob("a", 5.0, 2, 1000, cost)], 2)
    assert run.ended == {"a": 5.0 + 2000}
    assert run.mean_depth == {"a": 1.0}


def test_a_short_suffix_fits_where_a_whole_one_does_not():
    slow, quick = IterationCost((3.0, 6.0), (0.5, 0.5)), IterationCost((1.0, 2.0), (0.5, 0.5))
    jobs = [IterationJob("slow", 0, 1, 30, slow), IterationJob("quick", 0, 1, 8, quick, floor=0.5)]
    progress = {job.name: Progress(job.iterations) for job in jobs}
    progress["slow"].iterations = 15  # of the 16 that a round has time for
    _, turns = plan_round(jobs, progress, 1)
    assert [(turn.job.name, turn.start, turn.depth) for turn in turns] == [
        *(("slow", 6.0 * number, 2) for number in range(15)),
        *(("quick", 90.0 + number, 1) for number in range(6)),
    ]


def test_where_nothing_waits_iterations_are_deeper():
    cost = IterationCost((1.0, 1.9), (0.5, 0.5))
    job = IterationJob("a", 0, 1, 100, cost, floor=0.5)
    length, turns = plan_round([job], {"a": Progress(100)}, 1)
    # Thirty short iterations fill the round; the last of fewer has time to be whole.
    assert (length, [turn.depth for turn in turns]) == (30.4, [1] * 30)
    _, turns = plan_round([job], {"a": Progress(29)}, 1)
    assert [turn.depth for turn in turns] == [1] * 28 + [2]


def test_less_backprop_ends_sooner():
    cost = IterationCost((1.0, 2.0, 3.0, 4.0), (0.3, 0.3, 0.3, 0.3))
    ends = [
        run_rounds([IterationJob(f"{n}", 0, 1 + n % 3, 50, cost, floor) for n in range(8)], DEVICES).makespan_s
        for floor in (1.0, 0.5)
    ]
    assert ends[1] < ends[0] / 1.5


def test_a_job_that_fits_only_with_less_backprop_runs_so():
    cost = IterationCost((1.0, 2.0, 3.0, 4.0), (0.5, 0.9, 1.2, 1.5))
    run = run_rounds([IterationJob("a", 0, 1, 10, cost, floor=0.5)], 1)
    assert run.ended == {"a": 20.0}
    with pytest.raises(SchedulingError, match="memory"):
        run_rounds([IterationJob("a", 0, 1, 10, cost)], 1)
