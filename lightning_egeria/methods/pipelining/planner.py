"""Finding the plan whose slowest stage is fastest, with the fewest micro-batches in flight."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

from lightning_egeria.errors import ArgumentError, PlanError
from lightning_egeria.methods.pipelining.decomposition import Leaf, Series, Tree, decompose
from lightning_egeria.methods.pipelining.graph import ComputationGraph
from lightning_egeria.methods.pipelining.plan import Plan, Stage, in_running_order
from lightning_egeria.methods.pipelining.search import Search, Sizes, parts_of
from lightning_egeria.methods.pipelining.timeline import predict

# Shares by which the slowest stage may be slower for the sake of fewer micro-batches in flight.
SLOWER = (1.02, 1.05, 1.1, 1.2, 1.4)
EXACT = 1e-9  # two times that differ by this share count as equal
CLOSE = 1e-3  # share at which bisection ends


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan may use.

    Attributes:
        devices: number of devices, at most.
        micro_batches: number of parts of a batch.
        memory_bytes: memory of a device; None for no limit.
        group: forwards in a row: the ``k`` of a kFkB schedule.
        max_width: devices of one stage, at most; None for no limit.

    Raises:
        ArgumentError: if a number is not positive.
    """

    devices: int
    micro_batches: int
    memory_bytes: int | None = None
    group: int = 1
    max_width: int | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")


def plan_graph(graph: ComputationGraph, limits: Limits) -> Plan:
    """Return the plan of a graph pipeline with the shortest predicted step.

    The search is that of GraphPipe (Jeon et al., ASPLOS 2025, arXiv:2406.17145): bisection over the seconds of the
    slowest stage for one micro-batch, and for each such bound dynamic programming over (part of the graph, devices,
    micro-batches in flight behind it) that minimises the micro-batches in flight. A stage is a run of consecutive parts
    of a series, or several parts of a parallel. Of the fastest plan, of those with slightly slower stages and fewer
    micro-batches in flight, and of the stages of `plan_chain`, the one with the shortest predicted step wins.

    Args:
        graph: the graph.
        limits: what the plan may use.

    Raises:
        PlanError: if the graph does not fit into the memory of the devices, or takes no time.

    >>> from lightning_egeria.methods.pipelining.graph import Node
    >>> nodes = tuple(Node(name, 1, 2) for name in "abcd")
    >>> graph = ComputationGraph(nodes, ((0, 1), (0, 2), (1, 3), (2, 3)))
    >>> plan = plan_graph(graph, Limits(devices=4, micro_batches=4, max_width=1))
    >>> [stage.name for stage in plan.stages], plan.in_flight
    (['a', 'b', 'c', 'd'], (3, 2, 2, 1))
    """
    tree = decompose(graph).tree
    return _best_fitting(
        lambda: _shortest(graph, tree, limits, is_chain=False),
        lambda: dataclasses.replace(_best_chain(graph, tree, limits), is_chain=False),
    )


def plan_chain(graph: ComputationGraph, limits: Limits) -> Plan:
    """Return the plan with the shortest predicted step whose stages form a chain, as PipeDream and Piper have them.

    It has the same costs and the same search, over two orders of the nodes: as they run, and one branch after the
    other.

    Args:
        graph: the graph.
        limits: what the plan may use.

    Raises:
        PlanError: if the graph does not fit into the memory of the devices, or takes no time.
    """
    return _best_chain(graph, decompose(graph).tree, limits)


def _best_chain(graph: ComputationGraph, tree: Tree, limits: Limits) -> Plan:
    orders = {tuple(range(len(graph.nodes))), tree.nodes}
    trees: list[Tree] = [Series(tuple(map(Leaf, order))) if len(order) > 1 else Leaf(0) for order in orders]
    return _best_fitting(*(functools.partial(_shortest, graph, tree, limits, is_chain=True) for tree in trees))


def _best_fitting(*searches: Callable[[], Plan]) -> Plan:
    """Return the plan with the shortest predicted step, of the searches that find one; raise if none does."""
    plans, refusals = list[Plan](), list[PlanError]()
    for search in searches:
        try:
            plans.append(search())
        except PlanError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return min(plans, key=_cost)


def fastest_stages(
    tree: Tree, graph: ComputationGraph, limits: Limits
) -> tuple[float, list[tuple[tuple[int, ...], int]]]:
    """Return the shortest possible time of the slowest stage, and stages that reach it with the fewest in flight.

    Args:
        tree: the graph as a tree of series and parallels.
        graph: the graph.
        limits: what the plan may use.

    Returns:
        Seconds for one micro-batch, and the nodes and the number of devices of each stage.

    Raises:
        PlanError: if the graph does not fit into the memory of the devices, or takes no time.
    """
    root = parts_of(tree, [_sizes(graph, node) for node in range(len(graph.nodes))])

    def stages_below(bound: float) -> list[tuple[tuple[int, ...], int]] | None:
        return Search(
            limits.devices, limits.micro_batches, limits.group, limits.max_width, limits.memory_bytes, bound
        ).stages(root)

    total = root.sizes.seconds
    if not total:
        raise PlanError("a plan needs nodes that take time, and all of them take 0 s. Measure them first")
    most = total * (1 + EXACT)
    if limits.memory_bytes is not None and stages_below(most) is None:
        raise PlanError(
            f"no plan with {limits.devices} devices fits into {limits.memory_bytes} bytes on each. Allow more memory "
            "or devices, or make micro-batches smaller"
        )
    low = total / limits.devices
    high = low * (1 + EXACT)
    while (found := stages_below(high)) is None:
        low, high = high, min(high * 1.1, most)
    best = _bottleneck(found, graph, limits)
    while best > low * (1 + CLOSE):
        middle = (low + best) / 2
        better = stages_below(middle)
        if better is None:
            low = middle
        else:
            found, best = better, _bottleneck(better, graph, limits)
    while (better := stages_below(best * (1 - EXACT))) is not None:
        found, best = better, _bottleneck(better, graph, limits)
    return best, stages_below(best * (1 + EXACT)) or found


def _shortest(graph: ComputationGraph, tree: Tree, limits: Limits, is_chain: bool) -> Plan:
    best, stages = fastest_stages(tree, graph, limits)
    root = parts_of(tree, [_sizes(graph, node) for node in range(len(graph.nodes))])
    candidates = [stages]
    for factor in SLOWER:
        search = Search(
            limits.devices, limits.micro_batches, limits.group, limits.max_width, limits.memory_bytes, best * factor
        )
        slower = search.stages(root)
        if slower is not None and slower not in candidates:
            candidates.append(slower)
    plans = [_plan(graph, stages, limits, is_chain) for stages in candidates]
    return min(plans, key=_cost)


def _cost(plan: Plan) -> tuple[float, int, int]:
    return round(predict(plan).seconds, 12), max(plan.in_flight), plan.devices


def _sizes(graph: ComputationGraph, number: int) -> Sizes:
    node = graph.nodes[number]
    return Sizes(node.seconds, node.activation_bytes, node.parameter_bytes)


def _bottleneck(stages: Iterable[tuple[tuple[int, ...], int]], graph: ComputationGraph, limits: Limits) -> float:
    return max(
        sum(graph.nodes[node].seconds for node in nodes)
        * math.ceil(limits.micro_batches / width)
        / limits.micro_batches
        for nodes, width in stages
    )


def _plan(graph: ComputationGraph, stages: list[tuple[tuple[int, ...], int]], limits: Limits, is_chain: bool) -> Plan:
    order = range(len(stages)) if is_chain else in_running_order(graph, [nodes for nodes, _ in stages])
    named = []
    for number in order:
        nodes, width = stages[number]
        first, last = graph.nodes[min(nodes)].name, graph.nodes[max(nodes)].name
        named.append(Stage(first if len(nodes) == 1 else f"{first}..{last}", tuple(sorted(nodes)), width))
    return Plan(graph, tuple(named), limits.micro_batches, limits.group, is_chain)
