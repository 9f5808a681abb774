"""A plan: ranks, micro-batches in flight, memory, and what is refused."""

import json

import pytest

from lightning_egeria.errors import ArgumentError, PlanError
from lightning_egeria.methods.pipelining.graph import Node, chain_of
from lightning_egeria.methods.pipelining.plan import Plan, Stage, in_running_order
from support.pipelining.graphs import branches

GRAPH = branches(2)  # stem 0, branches 1 and 2, end 3
EACH = tuple(Stage(node.name, (number,)) for number, node in enumerate(GRAPH.nodes))


def test_stages_wait_for_those_they_read():
    plan = Plan(GRAPH, EACH, 8)
    assert plan.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert plan.in_flight == (3, 2, 2, 1)
    assert Plan(GRAPH, EACH, 2).in_flight == (2, 2, 2, 1)
    assert Plan(GRAPH, EACH, 8, group=2).in_flight == (6, 4, 4, 2)


def test_in_a_chain_each_waits_for_the_one_before():
    plan = Plan(GRAPH, EACH, 8, is_chain=True)
    assert set(plan.edges) == {(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)}
    assert plan.in_flight == (4, 3, 2, 1)


def test_the_devices_of_a_stage_take_turns():
    stages = (Stage("front", (0, 1), 3), Stage("back", (2, 3)))
    plan = Plan(GRAPH, stages, 8)
    assert (plan.devices, [*plan.ranks(0)], [*plan.ranks(1)]) == (4, [0, 1, 2], [3])
    assert [plan.rank(0, number) for number in range(5)] == [0, 1, 2, 0, 1]
    assert [plan.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert plan.in_flight == (4, 1)
    assert plan.in_flight_of_a_device(0) == 2
    assert plan.bottleneck_s == pytest.approx(0.12)  # the back; the front has 3 of 8 micro-batches on a device
    with pytest.raises(PlanError, match="no rank 4"):
        plan.place(4)


def test_memory_is_parameters_and_what_is_in_flight():
    nodes = [Node("a", 1, 2, 100, 7), Node("b", 1, 2, 10, 3)]
    plan = Plan(chain_of(nodes), (Stage("a", (0,)), Stage("b", (1,))), 4)
    assert [plan.memory_bytes(0), plan.memory_bytes(1)] == [207, 13]


def test_a_stage_without_backward_does_not_learn():
    nodes = [Node("frozen", 1, 0), Node("head", 1, 2)]
    plan = Plan(chain_of(nodes), (Stage("a", (0,)), Stage("b", (1,))), 4)
    assert plan.learns == (False, True)


def test_it_survives_json():
    plan = Plan(GRAPH, (Stage("front", (0, 1, 2), 2), Stage("back", (3,))), 8, group=2, is_chain=True)
    assert Plan.from_json(plan.to_json()) == plan
    shown = json.loads(plan.to_json())["stages"][0]
    assert (shown["nodes"], shown["width"]) == (["stem", "branch0.0", "branch1.0"], 2)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "graph": {}}'])
def test_damaged_json_is_refused(text):
    with pytest.raises(PlanError, match=r"not a plan of a graph pipeline|not a graph with"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (EACH[:3], "each of 4 nodes once"),
        ((*EACH, Stage("more", (3,))), "each of 4 nodes once"),
        ((Stage("a", (0, 1)), Stage("a", (2, 3))), "different names"),
        ((Stage("a", (0, 1)), Stage("b", (2, 3)), Stage("c", ())), "0 nodes on 1 devices"),
        ((Stage("a", (0, 1)), Stage("b", (2, 3), 0)), "on 0 devices"),
        ((Stage("a", (1, 2, 3)), Stage("b", (0,))), "List stages in the order"),
        ((Stage("a", (0, 3)), Stage("b", (1, 2))), "let no two stages read each other"),
    ],
)
def test_wrong_stages_are_refused(stages, message):
    with pytest.raises(PlanError, match=message):
        Plan(GRAPH, stages, 8)


def test_numbers_must_be_positive():
    with pytest.raises(ArgumentError, match="micro_batches must be at least 1, got 0"):
        Plan(GRAPH, EACH, 0)
    with pytest.raises(ArgumentError, match="group"):
        Plan(GRAPH, EACH, 1, group=0)


def test_running_order():
    assert in_running_order(GRAPH, [(3,), (1,), (2,), (0,)]) == [3, 1, 2, 0]
    with pytest.raises(PlanError, match=r"stages \[0, 1\] wait for each other"):
        in_running_order(GRAPH, [(0, 3), (1, 2)])
