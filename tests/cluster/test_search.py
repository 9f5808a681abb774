"""The search: against every allocation on small clusters, against its bound on large ones."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.cluster.search import Choices, search


def small_case(seed, current=False):
    """Jobs with concave speed-ups on two or three nodes, and a row for each if ``current``."""
    chosen = random.Random(seed)
    nodes = [chosen.choice((2, 3)) for _ in range(chosen.choice((2, 3)))]
    free = list(nodes)
    choices = []
    for _ in range(chosen.choice((2, 3))):
        most, power, penalty = chosen.choice((2, 4, 6)), chosen.uniform(0.2, 1), chosen.uniform(0.3, 1)
        one = [count**power * penalty for count in range(min(most, max(nodes)) + 1)]
        several = [0.0, 0.0, *(count**power * penalty * chosen.uniform(0.5, 1) for count in range(2, most + 1))]
        node = chosen.randrange(len(nodes))
        count = chosen.randint(0, min(free[node], len(one) - 1)) if current else 0
        free[node] -= count
        row = ((node, count),) if count else ()
        costs = [[1 / (speed + 0.1) for speed in speeds] for speeds in (one, several)]
        costs[1][:2] = [math.inf, math.inf]
        choices.append(Choices(*costs, row, 1 / (one[count] / penalty + 0.1)))
    return nodes, choices


def every_row(nodes, job):
    for counts in itertools.product(*(range(devices + 1) for devices in nodes)):
        row = tuple((node, count) for node, count in enumerate(counts) if count)
        total = sum(counts)
        if total < (len(job.on_several) if len(row) > 1 else len(job.on_one)):
            yield row


def feasible(nodes, rows):
    used, spanned = [0] * len(nodes), [0] * len(nodes)
    for row in rows:
        for node, count in row:
            used[node] += count
            spanned[node] += len(row) > 1
    return all(map(int.__le__, used, nodes)) and max(spanned) <= 1


def exhaustive(nodes, choices):
    """Return the least cost of all allocations."""
    rows = [list(every_row(nodes, job)) for job in choices]
    costs = (
        sum(job.cost(row) for job, row in zip(choices, together, strict=True))
        for together in itertools.product(*rows)
        if feasible(nodes, together)
    )
    return min(costs)


@pytest.mark.parametrize("current", [False, True], ids=["empty", "running"])
def test_small_cases_reach_the_exhaustive_optimum(current):
    ratios = []
    for seed in range(40):
        nodes, choices = small_case(seed, current)
        found, least = search(nodes, choices), exhaustive(nodes, choices)
        assert feasible(nodes, found.rows)
        assert found.bound <= least * (1 + 1e-9)
        ratios.append(found.cost / least)
    assert min(ratios) > 1 - 1e-9
    assert np.mean(np.array(ratios) < 1 + 1e-3) >= 0.9
    assert max(ratios) < 1.05


@st.composite
def cases(draw):
    nodes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    free, choices = list(nodes), []
    for _ in range(draw(st.integers(1, 8))):
        speeds = [draw(st.lists(st.floats(0, 10), min_size=1, max_size=8)) for _ in range(2)]
        one, several = ([1 / (speed + 0.01) for speed in (0.0, *values)] for values in speeds)
        several[:2] = [math.inf] * 2
        node, row = draw(st.integers(0, len(nodes) - 1)), ()
        count = draw(st.integers(0, min(free[node], len(one) - 1)))
        if count:
            free[node] -= count
            row = ((node, count),)
        choices.append(Choices(one, several, row, 1 / (draw(st.floats(0, 10)) + 0.01)))
    return nodes, choices


@settings(deadline=None)
@given(cases())
def test_any_case_stays_within_its_nodes_and_bound(case):
    nodes, choices = case
    found = search(nodes, choices, rounds=20)
    assert feasible(nodes, found.rows)
    assert found.cost == pytest.approx(sum(job.cost(row) for job, row in zip(choices, found.rows, strict=True)))
    assert found.bound <= found.cost * (1 + 1e-9)
    # Leaving everything as it is is an allocation, too.
    assert found.cost <= sum(job.keep for job in choices) * (1 + 1e-9)
    assert search(nodes, choices, rounds=20) == found


def test_a_node_has_one_spanning_job():
    spanning = Choices([9.0] * 4, [math.inf, math.inf, 9.0, 9.0, 1.0], (), 9.0)
    # Eight devices would do for both, but on three nodes they would meet.
    assert sorted(map(len, search([3, 3, 2], [spanning, spanning]).rows)) == [0, 2]
    assert sorted(map(len, search([3, 1, 3, 1], [spanning, spanning]).rows)) == [2, 2]
