"""What every policy promises: each job ends, gangs stay whole, and a run can be repeated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.cluster.jobs import Cluster, devices_of
from lightning_egeria.cluster.policies import POLICIES
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.workloads import Submission
from support.cluster import example
from support.models import slow

CHOOSE_THE_NUMBER = {"pollux", "optimus", "fair"}


def test_each_policy_is_new_and_knows_its_name():
    for name, policy in POLICIES.items():
        assert policy().name == name
        assert policy() is not policy()
    assert POLICIES.keys() == {"pollux", "tiresias", "optimus", "fcfs", "backfill", "srtf", "fair"}


@pytest.mark.parametrize("name", [slow(name) if name == "fair" else name for name in POLICIES])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), jobs=st.integers(1, 7), nodes=st.integers(2, 3))
def test_no_job_starves_and_no_gang_is_split(name, seed, jobs, nodes):
    workload, applications = example(jobs, 40, seed)
    cluster = Cluster.of(nodes, 4)
    record = simulate(workload, applications, cluster, POLICIES[name](), 120)  # refuses what the cluster does not have
    assert record.completion_times.keys() == {job.name for job in workload}
    assert 0 < record.utilisation <= 1
    gangs = {job.name: job.gang for job in workload}
    for interval in record.intervals:
        assert interval.devices <= cluster.devices
        for job_name, job in interval.jobs.items():
            if name not in CHOOSE_THE_NUMBER:
                assert devices_of(job.allocation) in (0, gangs[job_name])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from([1, 2, 4])), min_size=1, max_size=4))
def test_jobs_that_arrive_at_a_decision_end(name, jobs):
    _, applications = example()
    workload = [Submission(f"{at}", 120 * when, "vision", gang, 64 * gang) for at, (when, gang) in enumerate(jobs)]
    record = simulate(workload, applications, Cluster.of(1, 4), POLICIES[name](), 120)
    assert record.completion_times.keys() == {job.name for job in workload}
    assert 0 < record.utilisation <= 1


@pytest.mark.parametrize("name", POLICIES)
def test_one_workload_has_one_outcome(name):
    workload, applications = example(jobs=6)
    runs = [simulate(workload, applications, Cluster.of(2, 4), POLICIES[name](), 120) for _ in range(2)]
    assert runs[0] == runs[1]
