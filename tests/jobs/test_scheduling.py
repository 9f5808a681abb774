"""Policies over real jobs, with a clock and nodes that the test moves."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.cluster.queues import BackFill
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.rundirs import write_run_directory
from lightning_egeria.jobs.scheduling import LIVE, QueueEntry, Scheduler, policy_named

ONE = {"here": 2}
LIMITS = BatchLimits(32, 1024, 8, 256)


class Jobs:
    """Jobs that start and end as the scheduler says and the test wants."""

    def __init__(self, policy, nodes=ONE, interval_s=60.0):
        self.scheduler = Scheduler(policy_named(policy) if isinstance(policy, str) else policy, interval_s)
        self.nodes, self.now, self.entries, self.started = dict(nodes), 0.0, {}, {}

    def add(self, id, devices=1, most=None, **more):
        self.entries[id] = QueueEntry(id, self.now, devices, most, **more)

    def change(self, id, **changes):
        entry = self.entries[id]
        self.entries[id] = QueueEntry(**{**vars(entry), **changes})

    def decide(self, seconds=0.0):
        """Decide after some seconds, and start and stop jobs at once; return the devices of each."""
        self.now += seconds
        places = self.scheduler.decide([*self.entries.values()], self.nodes, self.now)
        for id in self.entries:
            self.change(id, place=places.get(id))
        used = {}
        for node, devices in places.values():
            used[node] = used.get(node, 0) + devices
        assert all(count <= self.nodes[node] for node, count in used.items())
        self.places = places
        return {id: devices for id, (_, devices) in places.items()}


def test_running_jobs_then_priority_then_arrival():
    jobs = Jobs("fcfs", {"here": 1})
    for id, priority in ((1, 0), (2, 0), (3, 5)):
        jobs.add(id, priority=priority)
    order = []
    while jobs.entries:
        (id,) = jobs.decide()
        order.append(id)
        del jobs.entries[id]
    assert order == [3, 1, 2]


def test_a_small_job_fills_the_gap_and_makes_room():
    jobs = Jobs(BackFill(threshold_s=10), interval_s=5.0)
    for id, devices in ((1, 1), (2, 2), (3, 1)):
        jobs.add(id, devices)
    assert jobs.decide() == {1: 1, 3: 1}
    del jobs.entries[1]
    assert jobs.decide(1.0) == {3: 1}
    assert jobs.decide(5.0) == {3: 1}
    assert jobs.decide(20.0) == {2: 2}


def test_one_that_did_not_pass_any_job_is_never_stopped():
    jobs = Jobs(BackFill(threshold_s=0), interval_s=0.0)
    jobs.add(1)
    jobs.decide()
    jobs.add(2, 2, priority=9)
    assert all(jobs.decide(1.0) == {1: 1} for _ in range(100))


def test_arrivals_and_ends_are_decided_at_once_and_the_rest_at_intervals():
    jobs = Jobs("fair")
    jobs.add(1, most=2)
    assert jobs.decide() == {1: 2}
    jobs.add(2, most=2)
    assert jobs.decide(1.0) == {1: 1, 2: 1}
    before = jobs.scheduler.policy.allocate
    jobs.scheduler.policy.allocate = None  # nothing has changed
    assert jobs.decide(1.0) == {1: 1, 2: 1}
    jobs.scheduler.policy.allocate = before
    del jobs.entries[1]
    assert jobs.decide(1.0) == {2: 2}
    del jobs.entries[2]
    assert jobs.decide(1.0) == {}


def test_service_counts_for_tiresias():
    jobs = Jobs("tiresias")
    jobs.add(1, 2)
    assert jobs.decide() == {1: 2}
    jobs.add(2, 2)
    jobs.change(1, service=16 * 3600.0)
    assert jobs.decide() == {2: 2}


def test_a_new_queue_goes_on_with_what_runs():
    jobs = Jobs("fcfs", {"a": 2, "b": 2})
    jobs.add(1, 2, place=("b", 2))
    jobs.add(2, 1, place=("a", 1))
    jobs.decide()
    assert jobs.places == {1: ("b", 2), 2: ("a", 1)}


def test_a_lost_node_gives_its_jobs_to_others():
    jobs = Jobs("fcfs", {"a": 2, "b": 2})
    jobs.add(1, 2)
    jobs.add(2, 2)
    jobs.decide()
    lost = jobs.places[1][0]
    del jobs.nodes[lost]
    assert jobs.decide() == {2: 2}
    del jobs.entries[2]
    (kept,) = jobs.nodes
    assert jobs.decide() == {1: 2}
    assert jobs.places == {1: (kept, 2)}


THREE_EACH = {"a": 3, "b": 3}


@pytest.mark.parametrize("policy", ["fair", "pollux"])
def test_a_number_that_fits_on_no_node_shrinks(policy):
    """Three jobs of two devices on two nodes of three: two of them run on two, and one on what a node has left."""
    jobs = Jobs(policy, THREE_EACH)
    for id in (1, 2, 3):
        jobs.add(id, most=2, starts=1)
    for _ in range(5):
        assert sorted(jobs.decide(100.0).values()) == [1, 2, 2]
    places = jobs.places
    jobs.decide(100.0)
    assert jobs.places == places or policy == "pollux"  # nothing restarts without a reason


@pytest.mark.parametrize("policy", ["tiresias", "fcfs", "backfill"])
def test_a_gang_runs_whole_or_waits_and_leaves_no_device_idle(policy):
    jobs = Jobs(policy, THREE_EACH)
    for id in (1, 2, 3):
        jobs.add(id, 2)
    assert jobs.decide() == {1: 2, 2: 2}
    jobs.add(4)  # fits where the third does not
    assert jobs.decide() == {1: 2, 2: 2, 4: 1}
    del jobs.entries[1]
    assert jobs.decide()[3] == 2
    for _ in range(5):
        assert jobs.decide(100.0) == {2: 2, 3: 2, 4: 1}


def test_what_fills_a_gap_makes_room_for_the_gang():
    jobs = Jobs("fcfs", THREE_EACH)
    for id, devices in ((1, 2), (2, 2), (3, 3)):
        jobs.add(id, devices)
    assert jobs.decide() == {1: 2, 2: 2}
    jobs.add(4)
    assert jobs.decide() == {1: 2, 2: 2, 4: 1}
    shared = next(id for id in (1, 2) if jobs.places[id][0] == jobs.places[4][0])
    del jobs.entries[shared]
    assert jobs.decide()[3] == 3
    assert jobs.places[4][0] != jobs.places[3][0]


def test_hints_decide_for_pollux(tmp_path):
    jobs = Jobs("pollux", {"here": 8})
    fast = ThroughputModel((0.01, 0.01), (1e-4, 1e-5), (1e-4, 1e-5), 1.0)
    slow = ThroughputModel((0.01, 0.01), (9.0, 9.0), (9.0, 9.0), 1.0)
    for id, model in ((1, fast), (2, slow)):
        path = tmp_path / str(id)
        Hints(LIMITS, 4, 100.0, 0.01, 100.0, model).write(path)
        jobs.add(id, most=8, hints=path, starts=1)
    found = jobs.decide(10_000.0)
    assert found[1] > found[2] == 1
    (tmp_path / "1").write_text("{")
    found = jobs.decide(10_000.0)
    assert found[1] + found[2] <= 8  # without hints it is still served


def test_the_shorter_job_first_and_one_that_tells_nothing_last(tmp_path):
    def hints(id, seconds):
        Hints(seconds_left=seconds).write(tmp_path / str(id))
        return tmp_path / str(id)

    jobs = Jobs("srtf", {"here": 1})
    jobs.add(1)
    assert jobs.decide() == {1: 1}  # no job has told anything
    jobs.change(1, hints=hints(1, 500.0))
    jobs.add(2)  # tells nothing, as it has not run
    assert jobs.decide() == {1: 1}
    limited = run_directory_with_limit(tmp_path, "5m")
    jobs.add(3, run=limited)
    assert jobs.decide() == {3: 1}  # 300 s at most
    jobs.change(3, service=250.0)
    hints(1, 40.0)
    assert jobs.decide(100.0) == {1: 1}  # 40 s, against 50
    del jobs.entries[1]
    assert jobs.decide() == {3: 1}
    del jobs.entries[3]
    jobs.add(4)
    assert jobs.decide() == {2: 1}  # in the order of arrival


def run_directory_with_limit(folder, limit):
    content = json.dumps({"resources": {"time": limit}}).encode()
    return write_run_directory(folder / "runs", {"job.json": content})


@pytest.mark.parametrize("limit", [None, "soon", 5, "9" * 30 + "d"])
def test_a_limit_that_is_none_does_not_stop_the_queue(limit, tmp_path):
    entry = QueueEntry(1, 0.0, 1, run=run_directory_with_limit(tmp_path, limit))
    assert entry.view(0.0, 1).seconds_left() == float("inf")
    assert QueueEntry(1, 0.0, 1, run=tmp_path / "evicted").view(0.0, 1).seconds_left() == float("inf")


@pytest.mark.parametrize("policy", LIVE)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("progress", "1" + "0" * 400),
        ("variance", "1" + "0" * 400),
        ("squared_norm", "1e308"),
        ("largest", "1" + "0" * 400),
        ("largest", "9223372036854775807"),
        ("largest", "2147483647"),
        ("initial", "2147483647"),
        ("gamma", "1" + "0" * 400),
        ("profiled", "1" + "0" * 400),
        ("compute", "[0, 0]"),
        ("between", "[1e300, 1e300]"),
        ("fewest_batches", "1048577"),
        ("seconds_left", "-1"),
        ("seconds_left", "1e300"),
        ("seconds_left", '"soon"'),
        ("limits", '{"initial": 1, "largest": 1, "smallest_local": 1, "largest_local": 1}'),
    ],
)
def test_hints_of_one_job_stop_no_other(policy, key, value, tmp_path):
    model = ThroughputModel((0.01, 0.001), (0.02, 0.002), (0.005, 0.0005), 2.0)
    path = tmp_path / "hints.json"
    Hints(LIMITS, 2, 120.5, 0.5, 40.0, model).write(path)
    text, count = re.subn(rf'"{key}": (\[[^\]]*\]|{{[^}}]*}}|[^,}}]+)', f'"{key}": {value}', path.read_text())
    assert count
    path.write_text(text)
    jobs = Jobs(policy)
    jobs.add(1, most=2, hints=path)
    jobs.add(2, most=2)
    assert jobs.decide()[2] > 0


def test_hints_are_no_link(tmp_path):
    Hints(LIMITS, 2, 120.5).write(tmp_path / "mine.json")
    (tmp_path / "hints.json").symlink_to(tmp_path / "mine.json")
    assert QueueEntry(1, 0.0, 1, 4, hints=tmp_path / "mine.json").view(0.0, 4).profiled == 2
    assert QueueEntry(1, 0.0, 1, 4, hints=tmp_path / "hints.json").view(0.0, 4).profiled == 0


def test_what_can_never_run_is_refused():
    scheduler = Scheduler(policy_named("fair"))
    assert scheduler.refuses(QueueEntry(1, 0.0, 3), {"a": 2, "b": 2}) == (
        "needs 3 devices, and the largest machine here has 2"
    )
    assert "Set resources.most_devices" in scheduler.refuses(QueueEntry(1, 0.0, 2), {"a": 2})
    assert scheduler.refuses(QueueEntry(1, 0.0, 2, 2), {"a": 2}) is None
    assert Scheduler(policy_named("backfill")).refuses(QueueEntry(1, 0.0, 2), {"a": 2}) is None
    with pytest.raises(QueueError, match=r"policy: expected one of backfill, .*, srtf, tiresias, got 'lifo'"):
        policy_named("lifo")
    with pytest.raises(QueueError, match=r"policy: optimus needs the speed of each job on every .* one of backfill"):
        policy_named("optimus")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LIVE),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), max_size=8),
    st.sampled_from([{"a": 3}, {"a": 3, "b": 3}, {"a": 3, "b": 1, "c": 2}]),
)
def test_devices_are_never_given_twice_and_all_jobs_run(policy, described, nodes):
    jobs = Jobs(policy, nodes)
    for id, (devices, priority) in enumerate(described):
        jobs.add(id, devices, 3 if policy in ("fair", "pollux") else None, priority=priority)
    for _ in range(3 * len(described) + 1):  # a job ends in each round
        running = jobs.decide(1000.0)
        if policy not in ("fair", "pollux"):
            assert all(running[id] == jobs.entries[id].devices for id in running)
        if running:
            del jobs.entries[next(iter(running))]
    assert jobs.entries == {}
