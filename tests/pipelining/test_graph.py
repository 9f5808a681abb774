"""A graph of computations: which node depends on which, and what is refused."""

import pytest

from lightning_egeria.errors import PlanError
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node, bits, members

DAMAGED = {"nodes": [["a"]], "edges": []}
INFINITE = {"nodes": [{"name": "a", "forward_s": 1, "backward_s": 1, "output_bytes": float("inf")}], "edges": []}
ABC = tuple(Node(name, 1, 2) for name in "abc")


def test_a_node_depends_on_all_before_it():
    graph = ComputationGraph(ABC, ((0, 1), (1, 2)))
    assert graph.before == (0, 0b1, 0b11)
    assert graph.is_before(0, 2)
    assert not graph.is_before(2, 0)


def test_it_survives_its_state():
    graph = ComputationGraph((Node("a", 0.1, 0.2, 3, 4, 5), *ABC[1:]), ((0, 2),))
    assert ComputationGraph.from_state(graph.to_state()) == graph


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ((), (), "no node"),
        ((*ABC, Node("a", 1, 1)), (), r"got \['a'\]"),
        ((Node("a", -1, 1),), (), "forward_s of node 'a' must be 0 or more, got -1"),
        ((Node("a", 1, float("nan")),), (), "backward_s"),
        (ABC, ((1, 1),), "got 1 to 1"),
        (ABC, ((0, 3),), "got 0 to 3"),
    ],
)
def test_a_wrong_graph_is_refused(nodes, edges, message):
    with pytest.raises(PlanError, match=message):
        ComputationGraph(nodes, edges)


@pytest.mark.parametrize(
    "state", [None, [], {"nodes": []}, {"nodes": [{"name": "a"}], "edges": []}, {"edges": 3}, DAMAGED, INFINITE]
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(PlanError, match="not a graph with"):
        ComputationGraph.from_state(state)


def test_bits_and_members_are_inverse():
    numbers = [0, 3, 64, 200]
    assert list(members(bits(numbers))) == numbers
