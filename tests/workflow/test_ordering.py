from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.workflow.ordering import Order, Waiting, in_order


def ids(jobs, usage=None):
    return [job.id for job in in_order(jobs, usage or {})]


def test_running_then_priority_then_fair_share_then_arrival():
    jobs = [Waiting(1, 1, share="a"), Waiting(2, 1, share="b"), Waiting(3, 1, 5, "a"), Waiting(4, 1, running=True)]
    assert ids(jobs, {"a": 100.0, "b": 1.0}) == [4, 3, 2, 1]
    assert ids(jobs) == [4, 3, 1, 2]


def test_a_small_job_fills_the_gap_and_makes_room():
    order = Order(2, threshold_s=10)
    jobs = [Waiting(1, 1, running=True), Waiting(2, 2), Waiting(3, 1)]
    assert order.choose(jobs, {}, 0.0) == ({3: frozenset({2})}, [])
    filled = Waiting(3, 1, running=True, filled=True)
    assert order.choose([Waiting(2, 2), filled], {}, 1.0) == ({}, [])
    assert order.choose([Waiting(2, 2), filled], {}, 12.0) == ({2: frozenset()}, [3])


def test_one_that_did_not_pass_anybody_is_never_stopped():
    order = Order(2, threshold_s=0)
    for now in range(100):
        starts, stops = order.choose([Waiting(1, 1, running=True), Waiting(2, 2, 9)], {}, float(now))
        assert (starts, stops) == ({}, [])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from("ab")), max_size=8), st.integers(1, 3))
def test_devices_are_never_given_twice(described, devices):
    jobs = [Waiting(id, min(count, devices), priority, share) for id, (count, priority, share) in enumerate(described)]
    order, running, now = Order(devices), {}, 0.0
    for _ in range(3 * len(jobs) + 1):  # a job ends in each round
        starts, stops = order.choose([running.get(job.id, job) for job in jobs], {}, now)
        assert stops == [] or starts
        for job in jobs:
            if job.id in starts:
                running[job.id] = Waiting(job.id, job.devices, job.priority, job.share, True, bool(starts[job.id]))
        for id in stops:
            del running[id]
        assert sum(job.devices for job in running.values()) <= devices
        if running:
            first = next(iter(running))
            jobs = [job for job in jobs if job.id != first]
            del running[first]
        now += 1000.0
    assert jobs == []
