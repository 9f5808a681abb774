"""Optimus: devices go where they save most time."""

import dataclasses

import pytest

from lightning_egeria.cluster.jobs import Cluster, devices_of
from lightning_egeria.cluster.optimus import Optimus
from lightning_egeria.errors import ArgumentError
from support.cluster import view


@dataclasses.dataclass
class Known:
    steps_left: float

    def step_seconds(self, replicas):
        return 1 / replicas


def counts(allocations):
    return {name: devices_of(allocation) for name, allocation in allocations.items()}


def test_the_longer_job_gets_more():
    jobs = [view("short", oracle=Known(10)), view("long", oracle=Known(100))]
    assert counts(Optimus().allocate(jobs, Cluster.of(2, 4), {}, 0)) == {"short": 2, "long": 6}


def test_nobody_gets_more_than_it_can_use():
    jobs = [view("a", oracle=Known(100), most_replicas=3), view("b", oracle=Known(1), most_replicas=2)]
    assert counts(Optimus().allocate(jobs, Cluster.of(2, 4), {}, 0)) == {"a": 3, "b": 2}


def test_who_came_first_runs_where_devices_are_few():
    jobs = [view(name, oracle=Known(10)) for name in "abc"]
    assert counts(Optimus().allocate(jobs, Cluster.of(1, 2), {}, 0)) == {"a": 1, "b": 1}


def test_an_unchanged_number_keeps_its_devices():
    jobs = [view("a", oracle=Known(10), most_replicas=2), view("b", oracle=Known(10), most_replicas=1)]
    current = {"a": ((1, 2),)}
    assert Optimus().allocate(jobs, Cluster.of(2, 2), current, 0) == {"a": ((1, 2),), "b": ((0, 1),)}


def test_outside_of_a_simulation_it_is_refused():
    with pytest.raises(ArgumentError, match="true speed"):
        Optimus().allocate([view("a")], Cluster.of(1, 1), {}, 0)
