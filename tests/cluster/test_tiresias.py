"""Tiresias: gangs, two queues, and nobody comes back from the second."""

from lightning_egeria.cluster.jobs import Cluster, devices_of
from lightning_egeria.cluster.tiresias import DEMOTION_DEVICE_S, Tiresias
from support.cluster import view

CLUSTER = Cluster.of(2, 4)


def test_first_come_first_served_past_a_gang_that_does_not_fit():
    jobs = [view("a", gang=6), view("b", gang=4), view("c", gang=2)]
    allocations = Tiresias().allocate(jobs, CLUSTER, {}, 0)
    assert {name: devices_of(allocation) for name, allocation in allocations.items()} == {"a": 6, "c": 2}


def test_a_job_with_much_service_gives_way():
    policy = Tiresias()
    old = view("old", gang=8)
    running = policy.allocate([old], CLUSTER, {}, 0)
    newcomer = view("new", gang=2)
    assert policy.allocate([old, newcomer], CLUSTER, running, 60) == running
    served = view("old", gang=8, service=DEMOTION_DEVICE_S)
    after = policy.allocate([served, newcomer], CLUSTER, running, 120)
    assert after.keys() == {"new"}
    assert policy.allocate([old, newcomer], CLUSTER, after, 180).keys() == {"new"}


def test_who_keeps_running_keeps_the_devices():
    policy = Tiresias()
    first = policy.allocate([view("a", gang=3)], CLUSTER, {}, 0)
    second = policy.allocate([view("a", gang=3), view("b", gang=5)], CLUSTER, first, 60)
    assert second["a"] == first["a"]
    assert second["b"] == ((1, 4), (0, 1))
