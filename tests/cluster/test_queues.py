"""Queues: order, gangs, and how long back-fill may delay the first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.cluster.jobs import Cluster, check, devices_of
from lightning_egeria.cluster.queues import BackFill, FirstComeFirstServed, ShortestRemaining
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.tiresias import Tiresias
from lightning_egeria.errors import ArgumentError
from support.cluster import example, view

CLUSTER = Cluster.of(2, 4)
INTERVAL_S = 60


def counts(allocations):
    return {name: devices_of(allocation) for name, allocation in allocations.items()}


def test_the_first_holds_up_the_others():
    jobs = [view("a", gang=5), view("b", gang=4), view("c", gang=1)]
    assert counts(FirstComeFirstServed().allocate(jobs, CLUSTER, {}, 60)) == {"a": 5}
    assert counts(BackFill().allocate(jobs, CLUSTER, {}, 60)) == {"a": 5, "c": 1}


def test_back_fill_gives_way_after_the_threshold():
    policy, jobs = BackFill(threshold_s=180), [view("a", gang=6), view("b", gang=8), view("c", gang=2)]
    running = policy.allocate(jobs, CLUSTER, {}, 60)
    assert running.keys() == {"a", "c"}
    # a has ended, and b would fit from now on if c were not there.
    jobs, running = jobs[1:], {"c": running["c"]}
    for now in (120, 180, 240):
        assert policy.allocate(jobs, CLUSTER, running, now) == running
    assert counts(policy.allocate(jobs, CLUSTER, running, 300)) == {"b": 8}


def test_the_last_to_arrive_is_stopped_first():
    jobs = [view("head", gang=6), view("b", gang=2), view("c", gang=2)]
    running = {"b": ((0, 2),), "c": ((0, 2),)}
    assert counts(BackFill(threshold_s=0).allocate(jobs, CLUSTER, running, 60)) == {"head": 6, "b": 2}


def test_the_shortest_stops_others():
    jobs = [view("long", gang=8, seconds_left=lambda: 900), view("short", gang=2, seconds_left=lambda: 30)]
    assert counts(ShortestRemaining().allocate(jobs, CLUSTER, {"long": ((0, 4), (1, 4))}, 60)) == {"short": 2}
    with pytest.raises(ArgumentError, match="estimate"):
        ShortestRemaining().allocate([view("a")], CLUSTER, {}, 60)


@pytest.mark.parametrize("threshold", [-1, float("inf"), float("nan")])
def test_a_threshold_is_a_time(threshold):
    with pytest.raises(ArgumentError, match="threshold_s"):
        BackFill(threshold)


workloads = st.lists(
    st.tuples(st.integers(0, 1200), st.integers(1, 8), st.integers(1, 1500)), min_size=1, max_size=14
).map(sorted)


def run(policy, workload):
    """Run jobs of known length; return the start of each, and what was decided when."""
    left = {f"{number}": (arrival, gang, seconds) for number, (arrival, gang, seconds) in enumerate(workload)}
    starts, decisions, current, now = {}, [], {}, 0
    while left:
        now += INTERVAL_S
        assert now < 1e5, "a job starves"
        for name in current:
            arrival, gang, seconds = left[name]
            left[name] = arrival, gang, seconds - INTERVAL_S
        left = {name: job for name, job in left.items() if job[2] > 0}
        views = [
            view(
                name, submitted=arrival, age=now - arrival, gang=gang, seconds_left=seconds.__int__, service=gang * now
            )
            for name, (arrival, gang, seconds) in left.items()
            if arrival <= now
        ]
        current = {name: row for name, row in current.items() if name in left}
        current = policy.allocate(views, CLUSTER, current, now)
        check(current, views, CLUSTER, policy.name)
        for job in views:
            assert devices_of(current.get(job.name, ())) in (0, job.gang), "a gang is split"
        for name in current:
            starts.setdefault(name, now)
        decisions.append((now, views, current))
    return starts, decisions


@settings(deadline=None)
@given(workloads, st.sampled_from([FirstComeFirstServed, BackFill, ShortestRemaining, Tiresias]))
def test_no_policy_starves_a_job_or_splits_a_gang(workload, policy):
    starts, _ = run(policy(), workload)
    assert len(starts) == len(workload)


@settings(deadline=None)
@given(workloads)
def test_first_come_first_served_starts_in_order(workload):
    starts, _ = run(FirstComeFirstServed(), workload)
    assert [starts[f"{number}"] for number in range(len(workload))] == sorted(starts.values())


@settings(deadline=None)
@given(workloads, st.sampled_from([0, 100, 300]))
def test_back_fill_never_delays_the_first_beyond_its_threshold(workload, threshold):
    _, decisions = run(BackFill(threshold), workload)
    would_fit = {}  # and waits since
    for now, views, current in decisions:
        for name in current:
            assert now - would_fit.pop(name, now) <= threshold
        waiting = [place for place, job in enumerate(views) if job.name not in current]
        if waiting:
            first = views[waiting[0]]
            earlier = sum(devices_of(current[job.name]) for job in views[: waiting[0]])
            if first.gang <= CLUSTER.devices - earlier:
                would_fit.setdefault(first.name, now)


@pytest.mark.parametrize("policy", [FirstComeFirstServed, BackFill, ShortestRemaining])
def test_every_job_of_the_example_ends(policy):
    workload, applications = example()
    record = simulate(workload, applications, Cluster.of(4, 4), policy())
    assert record.completion_times.keys() == {job.name for job in workload}


def test_back_fill_uses_what_first_come_first_served_leaves():
    workload, applications = example()
    plain, filled = (
        simulate(workload, applications, Cluster.of(4, 4), policy) for policy in (FirstComeFirstServed(), BackFill())
    )
    assert filled.average_completion_s < plain.average_completion_s
