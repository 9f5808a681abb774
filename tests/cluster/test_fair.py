"""Fair share: the same number of devices for each job."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_egeria.cluster.fair import FairShare
from lightning_egeria.cluster.jobs import Cluster, check, devices_of
from support.cluster import view


def allocate(jobs, cluster, current=None):
    allocations = FairShare().allocate(jobs, cluster, current or {}, 0.0)
    check(allocations, jobs, cluster, "fair")
    return allocations


def test_devices_are_shared_evenly():
    jobs = [view("a"), view("b"), view("c")]
    assert [devices_of(row) for row in allocate(jobs, Cluster.of(2, 4)).values()] == [3, 3, 2]


def test_a_job_gets_no_more_than_it_can_use():
    jobs = [view("a", most_replicas=1), view("b", most_replicas=5)]
    assert {name: devices_of(row) for name, row in allocate(jobs, Cluster.of(2, 4)).items()} == {"a": 1, "b": 5}


def test_the_last_to_arrive_waits():
    assert list(allocate([view("a"), view("b"), view("c")], Cluster.of(1, 2))) == ["a", "b"]


def test_a_job_with_its_share_keeps_its_devices():
    current = {"a": ((1, 1),), "b": ((0, 2),)}
    assert allocate([view("a"), view("b")], Cluster.of(2, 1), {"a": ((1, 1),)}) == {"a": ((1, 1),), "b": ((0, 1),)}
    assert allocate([view("a"), view("b")], Cluster.of(2, 2), current)["b"] == ((0, 2),)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 4))
def test_no_two_shares_differ_by_more_than_one(most, nodes, devices):
    jobs = [view(str(at), most_replicas=number) for at, number in enumerate(most)]
    cluster = Cluster.of(nodes, devices)
    found = allocate(jobs, cluster)
    counts = [devices_of(found.get(job.name, ())) for job in jobs]
    open_to_more = [count for count, number in zip(counts, most, strict=True) if count < number]
    assert sum(counts) == min(cluster.devices, sum(most))
    assert not open_to_more or max(counts) - min(open_to_more) <= 1
