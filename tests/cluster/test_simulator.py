"""The simulator: published figures to the digit, and mistakes of a policy."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.optimus import Optimus
from lightning_egeria.cluster.policies import POLICIES as ALL
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.tiresias import Tiresias
from lightning_egeria.cluster.workloads import Submission
from lightning_egeria.errors import ArgumentError, SchedulingError
from support.cluster import example, needs_published, published_average, published_traces, published_workload

GOLDEN = {"tiresias": 3469.69375, "optimus": 5301.875}
POLICIES = {"tiresias": Tiresias, "optimus": Optimus}


@needs_published
@pytest.mark.parametrize("policy", POLICIES)
def test_workload_6_is_exact_to_the_digit(policy):
    record = simulate(published_workload(6), published_traces(), Cluster.of(16, 4), POLICIES[policy]())
    assert record.average_completion_s == GOLDEN[policy] == published_average(policy, "1.0", 6)


@pytest.mark.slow
@needs_published
@pytest.mark.parametrize("load", ["1.0", "2.0"])
@pytest.mark.parametrize("policy", POLICIES)
def test_all_workloads_are_exact_to_the_digit(policy, load):
    for number in range(1, 9):
        record = simulate(published_workload(number, load), published_traces(), Cluster.of(16, 4), POLICIES[policy]())
        assert record.average_completion_s == published_average(policy, load, number), number


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_of_the_example_ends(policy):
    workload, applications = example()
    record = simulate(workload, applications, Cluster.of(4, 4), POLICIES[policy]())
    assert record.completion_times.keys() == {job.name for job in workload}
    assert min(record.completion_times.values()) > 0
    assert max(interval.devices for interval in record.intervals) <= 16
    assert simulate(workload, applications, Cluster.of(4, 4), POLICIES[policy]()) == record


def test_a_finer_interval_does_not_change_what_one_job_does():
    workload, applications = example(jobs=1)
    times = [
        simulate(workload, applications, Cluster.of(4, 4), Tiresias(), seconds).average_completion_s
        for seconds in (30, 60)
    ]
    # It waits for the first decision, and each epoch ends at a whole second.
    assert times[0] == pytest.approx(times[1], abs=30 + 12)


def two_jobs(first, second):
    workload = [Submission("a", first, "vision", 1, 64), Submission("b", second, "vision", 1, 64)]
    return simulate(workload, example()[1], Cluster.of(1, 4), Tiresias())


def test_time_without_jobs_costs_nothing():
    later = 60 * 25_000_000
    early, late = two_jobs(1, 1000), two_jobs(1 + later, 1000 + later)
    assert late.completion_times == early.completion_times
    assert [interval.time - later for interval in late.intervals] == [interval.time for interval in early.intervals]
    assert len(two_jobs(1, later).intervals) == len(early.intervals)


class Scripted:
    name, adapts_batch_size = "scripted", False

    def __init__(self, allocations):
        self.allocations = allocations

    def allocate(self, jobs, cluster, current, now):
        return self.allocations


@pytest.mark.parametrize(
    ("allocations", "message"), [({}, "waiting on an idle cluster"), ({"stranger": ((0, 1),)}, "stranger")]
)
def test_a_policy_that_errs_is_named(allocations, message):
    workload, applications = example(jobs=2)
    with pytest.raises(SchedulingError, match=f"scripted .*{message}"):
        simulate(workload, applications, Cluster.of(1, 4), Scripted(allocations))


@pytest.mark.parametrize("policy", ["fcfs", "backfill", "srtf", "tiresias"])
def test_a_gang_larger_than_the_cluster_is_an_error(policy):
    _, applications = example()
    workload = [Submission("a", 0, "vision", 1, 64), Submission("b", 0, "vision", 17, 1024)]
    with pytest.raises(SchedulingError, match="idle cluster of 4 devices; b asks for 17"):
        simulate(workload, applications, Cluster.of(1, 4), ALL[policy]())


def test_a_policy_without_gangs_takes_any_job():
    _, applications = example()
    record = simulate([Submission("a", 0, "vision", 17, 64)], applications, Cluster.of(1, 4), Optimus())
    assert record.completion_times.keys() == {"a"}


@pytest.mark.parametrize("seconds", [0, -1, 1e-300, 0.5, float("inf"), float("nan")])
def test_an_interval_has_a_length(seconds):
    with pytest.raises(ArgumentError, match="interval_s"):
        simulate([], {}, Cluster.of(1, 1), Tiresias(), seconds)


def test_the_simulator_needs_no_torch():
    program = (
        "import sys, lightning_egeria.cluster.simulator, lightning_egeria.cluster.example;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'pandas')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
