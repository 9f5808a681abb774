"""A plan: which stage has which nodes, on how many devices, and what that costs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_egeria.core.programs.arguments import LARGEST
from lightning_egeria.core.programs.files import parsed_json
from lightning_egeria.errors import ArgumentError, PlanError
from lightning_egeria.methods.pipelining.graph import ComputationGraph

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Stage:
    """Nodes that run on the same devices.

    Attributes:
        name: its name.
        nodes: numbers of its nodes in the graph.
        width: number of devices. Each has all parameters of the stage, and takes its turn with the micro-batches; of
            a small last batch, some may have none.
    """

    name: str
    nodes: tuple[int, ...]
    width: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Stages that share out the nodes of a graph, in an order in which they can run.

    Args:
        graph: the graph.
        stages: the stages.
        micro_batches: number of parts of a batch.
        group: forwards in a row, and backwards in a row: the ``k`` of a kFkB schedule.
        is_chain: each stage waits for the one before it, as in a pipeline that knows no branches.

    Raises:
        ArgumentError: if a number is not positive.
        PlanError: if the stages do not hold each node once, or wait for each other in a circle.
    """

    graph: ComputationGraph
    stages: tuple[Stage, ...]
    micro_batches: int
    group: int = 1
    is_chain: bool = False

    def __post_init__(self) -> None:
        for name, value in (("micro_batches", self.micro_batches), ("group", self.group)):
            if value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")
        placed = sorted(node for stage in self.stages for node in stage.nodes)
        if placed != list(range(len(self.graph.nodes))):
            raise PlanError(f"the stages must hold each of {len(self.graph.nodes)} nodes once, got {placed}")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise PlanError(f"stages need different names, got {names}")
        for stage in self.stages:
            if stage.width < 1 or not stage.nodes:
                raise PlanError(
                    f"stage {stage.name!r} has {len(stage.nodes)} nodes on {stage.width} devices, expected at least "
                    "one of each"
                )
        for first, second in self.edges:
            if first >= second:
                raise PlanError(
                    f"stage {names[first]!r} comes after stage {names[second]!r} and is read by it. List stages in the "
                    "order in which they run, and let no two stages read each other"
                )

    @functools.cached_property
    def stage_of(self) -> tuple[int, ...]:
        """For each node, the number of its stage."""
        places = {node: number for number, stage in enumerate(self.stages) for node in stage.nodes}
        return tuple(places[node] for node in range(len(self.graph.nodes)))

    @functools.cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages of which the second waits for the first."""
        pairs = {(self.stage_of[first], self.stage_of[second]) for first, second in self.graph.edges}
        if self.is_chain:
            pairs |= {(number, number + 1) for number in range(len(self.stages) - 1)}
        return tuple(sorted((first, second) for first, second in pairs if first != second))

    def inputs(self, stage: int) -> list[int]:
        """Return the stages that a stage waits for."""
        return [first for first, second in self.edges if second == stage]

    def outputs(self, stage: int) -> list[int]:
        """Return the stages that wait for a stage."""
        return [second for first, second in self.edges if first == stage]

    @functools.cached_property
    def learns(self) -> tuple[bool, ...]:
        """Whether each stage has a backward."""
        return tuple(any(self.graph.nodes[node].backward_s > 0 for node in stage.nodes) for stage in self.stages)

    @functools.cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the micro-batches between forward and backward at most, on all its devices together.

        ``group x width``, and as many as the stages behind it have: the longest path to the last stage.
        """
        counts = [0] * len(self.stages)
        for number in reversed(range(len(self.stages))):
            behind = max((counts[other] for other in self.outputs(number)), default=0)
            counts[number] = behind + self.group * self.stages[number].width
        return tuple(min(count, self.micro_batches) for count in counts)

    def in_flight_of_a_device(self, stage: int) -> int:
        """Return the micro-batches between forward and backward on one device of a stage, at most."""
        return math.ceil(self.in_flight[stage] / self.stages[stage].width)

    def seconds(self, stage: int) -> tuple[float, float]:
        """Return the seconds of a stage's forward and of its backward, on one micro-batch."""
        nodes = [self.graph.nodes[node] for node in self.stages[stage].nodes]
        return sum(node.forward_s for node in nodes), sum(node.backward_s for node in nodes)

    def memory_bytes(self, stage: int) -> int:
        """Return the bytes of parameters and kept activations on one device of a stage."""
        nodes = [self.graph.nodes[node] for node in self.stages[stage].nodes]
        kept = sum(node.activation_bytes for node in nodes) * self.in_flight_of_a_device(stage)
        return kept + sum(node.parameter_bytes for node in nodes)

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage for one micro-batch, when its devices share the micro-batches."""
        return max(
            sum(self.seconds(number)) * busiest_share(self.micro_batches, stage.width)
            for number, stage in enumerate(self.stages)
        )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(stage.width for stage in self.stages)

    def ranks(self, stage: int) -> range:
        """Return the ranks of a stage, one for each device."""
        start = sum(other.width for other in self.stages[:stage])
        return range(start, start + self.stages[stage].width)

    def rank(self, stage: int, micro_batch: int) -> int:
        """Return the rank on which a stage runs a micro-batch."""
        return self.ranks(stage)[micro_batch % self.stages[stage].width]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the stage of a rank, and its number among the devices of the stage."""
        for number in range(len(self.stages)):
            if rank in self.ranks(number):
                return number, rank - self.ranks(number).start
        raise PlanError(f"the plan has {self.devices} devices and no rank {rank}")

    def to_json(self) -> str:
        """Return the plan and its graph as JSON."""
        stages = [
            {
                "name": stage.name,
                "nodes": [self.graph.nodes[node].name for node in stage.nodes],
                "width": stage.width,
                "in_flight": self.in_flight[number],
                "memory_bytes": self.memory_bytes(number),
            }
            for number, stage in enumerate(self.stages)
        ]
        settings = {"micro_batches": self.micro_batches, "group": self.group, "is_chain": self.is_chain}
        return json.dumps({"format": FORMAT, **settings, "stages": stages, "graph": self.graph.to_state()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan from `to_json`.

        Raises:
            PlanError: if the text is damaged.
        """
        try:
            state = parsed_json(text)
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']}")
            graph = ComputationGraph.from_state(state["graph"])
            numbers = {node.name: number for number, node in enumerate(graph.nodes)}
            stages = tuple(
                Stage(_text(entry["name"]), tuple(numbers[name] for name in entry["nodes"]), _count(entry["width"]))
                for entry in state["stages"]
            )
            settings: dict[str, Any] = {name: _count(state[name]) for name in ("micro_batches", "group")}
            return cls(graph, stages, **settings, is_chain=bool(state["is_chain"]))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise PlanError(f"this is not a plan of a graph pipeline: {type(error).__name__} {error}") from error


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a text, got {value!r:.40}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value > LARGEST:
        raise ValueError(f"expected a whole number of at most {LARGEST}, got {value!r:.40}")
    return value


def busiest_share(micro_batches: int, width: int) -> float:
    """Return the share of the micro-batches that the busiest of ``width`` devices has.

    >>> busiest_share(8, 1), busiest_share(8, 3)
    (1.0, 0.375)
    """
    return math.ceil(micro_batches / width) / micro_batches


def in_running_order(graph: ComputationGraph, groups: Sequence[Iterable[int]], names: Sequence[str] = ()) -> list[int]:
    """Return an order of groups of nodes in which each reads from earlier ones only.

    Args:
        graph: the graph.
        groups: node numbers of each group.
        names: of the groups, for the message of an error; none for their numbers.

    Raises:
        PlanError: if there is none.
    """
    home = {node: number for number, group in enumerate(groups) for node in group}
    waits: list[set[int]] = [set() for _ in groups]
    for first, second in graph.edges:
        if first in home and second in home and home[first] != home[second]:
            waits[home[second]].add(home[first])
    order: list[int] = []
    while len(order) < len(groups):
        ready = [number for number in range(len(groups)) if number not in order and waits[number] <= set(order)]
        if not ready:
            stuck = [names[number] if names else number for number in range(len(groups)) if number not in order]
            raise PlanError(f"stages {stuck} wait for each other in a circle. Move nodes so that they do not")
        order.append(min(ready, key=lambda number: min(home_node for home_node in groups[number])))
    return order


def plan_of_named(
    graph: ComputationGraph,
    groups: Sequence[Sequence[str]],
    stages: Mapping[str, Sequence[str]],
    micro_batches: int,
    group: int,
) -> Plan:
    """Return the plan whose stages are named.

    Args:
        graph: the graph.
        groups: module paths of each node.
        stages: module paths of each stage, by its name.
        micro_batches: number of parts of a batch.
        group: forwards in a row.

    Raises:
        ArgumentError: if the model calls no module of a stage.
        PlanError: if stages wait for each other in a circle.
    """
    home = {path: name for name, paths in stages.items() for path in paths}
    nodes: dict[str, list[int]] = {name: [] for name in stages}
    for number, together in enumerate(groups):
        names = {home[path] for path in together}
        if len(names) > 1:
            raise PlanError(f"stages {sorted(names)} wait for each other in a circle. Move modules so that they do not")
        nodes[names.pop()].append(number)
    idle = [name for name, found in nodes.items() if not found]
    if idle:
        raise ArgumentError(f"stages: the model calls no module of stage {idle[0]!r}")
    names_in_order = [list(nodes)[number] for number in in_running_order(graph, list(nodes.values()), list(nodes))]
    return Plan(graph, tuple(Stage(name, tuple(nodes[name])) for name in names_in_order), micro_batches, group)
