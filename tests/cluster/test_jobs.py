"""Allocations: taken from the emptiest node, and refused where no cluster could give them."""

import pytest

from lightning_egeria.cluster.jobs import Cluster, check, devices_of, take_emptiest
from lightning_egeria.errors import ArgumentError, SchedulingError
from support.cluster import view


def test_free_devices_are_those_that_no_job_holds():
    cluster = Cluster.of(3, 4)
    assert cluster.free({"a": ((0, 4), (2, 1)), "b": ((2, 2),)}) == [0, 4, 1]


def test_the_emptiest_node_comes_first():
    free = [1, 4, 3]
    assert take_emptiest(free, 6) == ((1, 4), (2, 2))
    assert free == [1, 0, 1]


def test_more_than_is_free_cannot_be_taken():
    with pytest.raises(ArgumentError, match="2 more devices"):
        take_emptiest([1, 0], 3)


@pytest.mark.parametrize("nodes", [(), (4, 0)])
def test_a_cluster_has_devices_on_each_node(nodes):
    with pytest.raises(ArgumentError, match="at least one device"):
        Cluster(nodes)


@pytest.mark.parametrize(
    ("allocations", "message"),
    [
        ({"c": ((0, 1),)}, "neither wait nor run"),
        ({"a": ()}, "distinct nodes"),
        ({"a": ((0, 0),)}, "distinct nodes"),
        ({"a": ((2, 1),)}, "distinct nodes"),
        ({"a": ((0, 1), (0, 1))}, "distinct nodes"),
        ({"a": ((0, 3),), "b": ((0, 2),)}, "5 devices of node 0, which has 4"),
    ],
    ids=["unknown job", "empty", "no device", "unknown node", "node twice", "too many"],
)
def test_what_no_cluster_can_give_is_refused(allocations, message):
    with pytest.raises(SchedulingError, match=message):
        check(allocations, [view("a"), view("b")], Cluster.of(2, 4), "policy")


def test_a_full_cluster_is_fine():
    allocations = {"a": ((0, 4), (1, 1)), "b": ((1, 3),)}
    check(allocations, [view("a"), view("b")], Cluster.of(2, 4), "policy")
    assert sum(map(devices_of, allocations.values())) == 8
