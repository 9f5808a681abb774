"""Jobs of iterations: costs, the ceiling, and gangs by hand."""

import json

import pytest

from benchmarks.scheduling.iterations import IterationCost, IterationJob, ceiling, run_gangs
from lightning_egeria.errors import ArgumentError, SchedulingError, TraceError

COST = IterationCost((1.0, 2.0, 4.0, 8.0), (0.2, 0.3, 0.4, 0.5))


def job(name, gang=1, iterations=10, arrival_s=0.0, floor=1.0):
    return IterationJob(name, arrival_s, gang, iterations, COST, floor)


@pytest.mark.parametrize(("depth", "seconds"), [(4, 8.0), (2, 2.0), (2.5, 3.0), (1, 1.0)])
def test_the_cheapest_mixture_has_the_mean_depth(depth, seconds):
    assert COST.cheapest(depth) == seconds


def test_a_mixture_may_skip_depths():
    # From 1 straight to 3: depth 2 costs nearly as much as 3.
    assert IterationCost((1.0, 2.9, 3.0), (0.1, 0.1, 0.1)).cheapest(2) == 2.0


def test_first_come_first_served_by_hand():
    run = run_gangs([job("a", 2), job("b", 3, arrival_s=1), job("c", 1, arrival_s=2)], devices=3)
    # b waits for a, and c for b.
    assert run.ended == {"a": 80, "b": 160, "c": 240}
    assert run.efficiency == (2 + 3 + 1) * 80 / (3 * 240)
    assert run.average_completion_s == (80 + 159 + 238) / 3


def test_the_shortest_goes_first():
    run = run_gangs([job("long", 2), job("short", 2, iterations=1, arrival_s=8)], devices=2, shortest_first=True)
    assert run.ended == {"short": 16, "long": 88}


def test_partial_backprop_reaches_the_ceiling_of_one_job():
    jobs = [job("a", gang=2, floor=0.5)]
    assert run_gangs(jobs, devices=2).efficiency == ceiling(jobs) == 4.0
    assert run_gangs(jobs, devices=2).mean_depth == {"a": 0.5}


def test_a_gang_that_never_fits_is_refused():
    with pytest.raises(SchedulingError, match="a asks for 3"):
        run_gangs([job("a", 3)], devices=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: IterationCost((), ()),
        lambda: IterationCost((1.0, 0.5), (0.1, 0.1)),
        lambda: IterationCost((0.0,), (0.1,)),
        lambda: IterationCost((1.0,), (0.1, 0.2)),
        lambda: job("a", gang=0),
        lambda: job("a", iterations=0),
        lambda: job("a", floor=0.1),
        lambda: job("a", floor=1.1),
    ],
)
def test_impossible_arguments_are_refused(make):
    with pytest.raises(ArgumentError, match="expected"):
        make()


MEASURED = {"version": 1, "forward_s": [1.0, 1.1], "backward_s": [0.5, 0.3], "bytes": [30, 40]}


def test_measured_costs_are_read(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(MEASURED))
    cost = IterationCost.read(path, device_bytes=80)
    # The deeper iteration was measured to be the faster one, by chance.
    assert (cost.seconds, cost.memory) == ((1.5, 1.5), (0.375, 0.5))


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"bytes": [30, 90]}, {"bytes": [1]}, {"forward_s": [1, "x"]}, {"forward_s": None}]
)
def test_what_is_no_measured_costs_is_refused(change, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(MEASURED | change))
    with pytest.raises(TraceError, match="no measured costs"):
        IterationCost.read(path, device_bytes=80)
