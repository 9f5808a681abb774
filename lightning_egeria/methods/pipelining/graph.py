"""The graph of a network's computations, and what each of them costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning_egeria.errors import PlanError

MOST_NODES, MOST_EDGES = 5000, 50_000  # of a graph that is read
_LARGEST, _SHORTEST_S, _LONGEST_S = 2**60, 1e-12, 1e9


@dataclasses.dataclass(frozen=True)
class Node:
    """One computation, such as the call of one layer module.

    Attributes:
        name: its name; no two nodes of a graph share one.
        forward_s: seconds of its forward on one micro-batch.
        backward_s: seconds of its backward on one micro-batch; 0 if nothing in front of it or in it trains.
        activation_bytes: bytes kept from forward to backward, for one micro-batch.
        parameter_bytes: bytes of parameters, their gradients and optimizer state.
        output_bytes: bytes of its output, for one micro-batch.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch, in seconds."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True)
class ComputationGraph:
    """Nodes in an order in which they can run, and edges from each node to those that read its output.

    Args:
        nodes: the nodes.
        edges: pairs of node numbers; the first of a pair is the smaller one.

    Raises:
        PlanError: if a name is used twice, a cost is negative, or an edge does not lead to a later node.

    >>> graph = ComputationGraph((Node("a", 1, 2), Node("b", 1, 2), Node("c", 1, 2)), ((0, 1), (0, 2)))
    >>> graph.is_before(0, 2), graph.is_before(1, 2)
    (True, False)
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1] if len({*names}) < len(names) else []
        if twice or not names:
            raise PlanError(f"the graph needs nodes with different names, got {twice or 'no node'}")
        for node in self.nodes:
            costs = {key: value for key, value in dataclasses.asdict(node).items() if key != "name"}
            wrong = [key for key, value in costs.items() if not 0 <= value < float("inf")]
            if wrong:
                raise PlanError(f"{wrong[0]} of node {node.name!r} must be 0 or more, got {costs[wrong[0]]}")
        for first, second in self.edges:
            if not 0 <= first < second < len(names):
                raise PlanError(f"each edge must lead from an earlier to a later node, got {first} to {second}")

    @functools.cached_property
    def before(self) -> tuple[int, ...]:
        """For each node, the nodes on which it depends, as bits of an integer."""
        sets = [0] * len(self.nodes)
        for first, second in sorted(self.edges, key=lambda edge: edge[1]):
            sets[second] |= sets[first] | 1 << first
        return tuple(sets)

    def is_before(self, first: int, second: int) -> bool:
        """Whether node ``second`` depends on node ``first``, directly or not."""
        return bool(self.before[second] >> first & 1)

    def recomputed(self) -> ComputationGraph:
        """Return the costs when each node keeps only what it reads, and repeats its forward before its backward."""
        nodes = [
            dataclasses.replace(
                node,
                backward_s=node.backward_s and node.backward_s + node.forward_s,
                activation_bytes=(node.backward_s > 0)
                * sum(self.nodes[first].output_bytes for first, second in self.edges if second == number),
            )
            for number, node in enumerate(self.nodes)
        ]
        return ComputationGraph(tuple(nodes), self.edges)

    def to_state(self) -> dict[str, Any]:
        """Return the graph in plain types."""
        return {
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "edges": [list(edge) for edge in self.edges],
        }

    @classmethod
    def from_state(cls, state: Any) -> ComputationGraph:
        """Return the graph from `to_state`.

        Raises:
            PlanError: if the state is damaged.
        """
        try:
            if len(state["nodes"]) > MOST_NODES or len(state["edges"]) > MOST_EDGES:
                raise ValueError(f"more than {MOST_NODES} nodes or {MOST_EDGES} edges")
            nodes = tuple(_node(entry) for entry in state["nodes"])
            edges = tuple((_whole(first), _whole(second)) for first, second in state["edges"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise PlanError(f"this is not a graph with 'nodes' and 'edges': {type(error).__name__} {error}") from error
        return cls(nodes, edges)


def _node(entry: dict[str, Any]) -> Node:
    if type(entry["name"]) is not str:
        raise TypeError(f"the name of a node is a text, got {entry['name']!r:.40}")
    sizes = {key: _whole(entry.get(key, 0)) for key in ("activation_bytes", "parameter_bytes", "output_bytes")}
    return Node(entry["name"], _seconds(entry["forward_s"]), _seconds(entry["backward_s"]), **sizes)


def _whole(value: Any) -> int:
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST or value != int(value):
        raise ValueError(f"expected a whole number from 0 to {_LARGEST:g}, got {value!r:.40}")
    return int(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not (value == 0 or _SHORTEST_S <= value <= _LONGEST_S):
        raise ValueError(f"expected 0, or seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}, got {value!r:.40}")
    return float(value)


def bits(numbers: Iterable[int]) -> int:
    """Return a set of small numbers as bits of an integer.

    >>> bits([0, 2])
    5
    """
    return functools.reduce(lambda mask, number: mask | 1 << number, numbers, 0)


def members(mask: int) -> Iterator[int]:
    """Yield the numbers in a set of `bits`, smallest first.

    >>> list(members(5))
    [0, 2]
    """
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def chain_of(nodes: Sequence[Node]) -> ComputationGraph:
    """Return the graph in which each node reads the one before it."""
    return ComputationGraph(tuple(nodes), tuple((number, number + 1) for number in range(len(nodes) - 1)))
