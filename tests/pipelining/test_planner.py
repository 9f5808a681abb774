"""Plans: the best of all on small graphs, quick on large ones, refusals in words."""

import random
import time

import pytest

from lightning_egeria.errors import ArgumentError, PlanError
from lightning_egeria.methods.pipelining.decomposition import decompose
from lightning_egeria.methods.pipelining.examples import EXAMPLES
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node, chain_of
from lightning_egeria.methods.pipelining.plan import Plan, Stage, in_running_order
from lightning_egeria.methods.pipelining.planner import Limits, fastest_stages, plan_chain, plan_graph
from lightning_egeria.methods.pipelining.timeline import predict
from support.pipelining.graphs import best_of_all, branches, random_graph, series_parallel


def limits_of(seed):
    generator = random.Random(seed)
    return Limits(
        devices=generator.randint(1, 4),
        micro_batches=generator.randint(1, 6),
        memory_bytes=generator.choice([None, 20, 35, 60]),
        group=generator.choice([1, 1, 2]),
        max_width=generator.choice([None, 1]),
    )


def check_best(seed, most):
    graph = (random_graph if seed % 2 else series_parallel)(seed, most)
    limits, decomposition = limits_of(seed), decompose(graph)
    best = best_of_all(graph, decomposition, limits)
    if best is None:
        with pytest.raises(PlanError, match="fits into"):
            fastest_stages(decomposition.tree, graph, limits)
        return
    slowest, stages = fastest_stages(decomposition.tree, graph, limits)
    assert slowest == pytest.approx(best[0])
    # The order of the tree, which may put more in series than the graph does.
    order = {(a, b) for a in range(len(graph.nodes)) for b in range(a) if graph.is_before(b, a)}
    ordered = ComputationGraph(
        graph.nodes, tuple(sorted({(b, a) for a, b in order} | {(a, b) for a, b in decomposition.serialised if a < b}))
    )
    if all(a < b for a, b in decomposition.serialised):
        places = in_running_order(ordered, [nodes for nodes, _ in stages])
        named = tuple(Stage(str(place), stages[place][0], stages[place][1]) for place in places)
        plan = Plan(ordered, named, limits.micro_batches, limits.group)
        assert plan.bottleneck_s == pytest.approx(slowest)
        assert max(plan.in_flight) == min(best[1], limits.micro_batches)
        memory = [plan.memory_bytes(number) for number in range(len(plan.stages))]
        assert limits.memory_bytes is None or max(memory) <= limits.memory_bytes


def test_it_finds_the_best_of_all_plans():
    for seed in range(150):
        check_best(seed, most=6)


@pytest.mark.slow
def test_it_finds_the_best_on_a_thousand_graphs():
    for seed in range(1000):
        check_best(seed, most=8)


def test_branches_run_at_once():
    limits = Limits(devices=6, micro_batches=8, max_width=1)
    graph, chain = plan_graph(branches(4), limits), plan_chain(branches(4), limits)
    assert graph.in_flight == (3, 2, 2, 2, 2, 1)
    assert chain.in_flight == (6, 5, 4, 3, 2, 1)
    assert predict(chain).seconds / predict(graph).seconds == pytest.approx(1.3)
    four = Limits(devices=6, micro_batches=4, max_width=1)
    ratio = predict(plan_chain(branches(4), four)).seconds / predict(plan_graph(branches(4), four)).seconds
    assert ratio == pytest.approx(1.5)


def test_a_graph_is_never_planned_slower_than_the_chain():
    for seed in range(40):
        graph, limits = random_graph(seed), Limits(devices=3, micro_batches=5)
        chain = plan_chain(graph, limits)
        assert predict(plan_graph(graph, limits)).seconds <= predict(chain).seconds * (1 + 1e-9)


def test_a_chain_is_planned_as_a_chain():
    graph = chain_of([Node(str(number), 1, 2) for number in range(8)])
    limits = Limits(devices=4, micro_batches=8, max_width=1)
    assert plan_graph(graph, limits).stages == plan_chain(graph, limits).stages
    assert [len(stage.nodes) for stage in plan_graph(graph, limits).stages] == [2, 2, 2, 2]


def test_less_memory_means_fewer_in_flight_or_a_refusal():
    nodes = [Node(str(number), 1, 2, 10, 1) for number in range(4)]
    plan = plan_graph(chain_of(nodes), Limits(devices=4, micro_batches=8, memory_bytes=50, max_width=1))
    assert max(plan.memory_bytes(number) for number in range(len(plan.stages))) <= 50
    with pytest.raises(PlanError, match="no plan with 4 devices fits into 10 bytes"):
        plan_graph(chain_of(nodes), Limits(devices=4, micro_batches=8, memory_bytes=10))


def fits_without_a_chain():
    nodes = [Node("stem", 1, 1, 3, 3), Node("left", 1, 4, 1, 5), Node("right", 2, 2, 5, 4)]
    return ComputationGraph(tuple(nodes), ((0, 1), (0, 2)))


def test_a_graph_fits_where_no_chain_does():
    limits = Limits(devices=4, micro_batches=4, memory_bytes=10, max_width=1)
    with pytest.raises(PlanError, match="fits into"):
        plan_chain(fits_without_a_chain(), limits)
    plan = plan_graph(fits_without_a_chain(), limits)
    assert max(plan.memory_bytes(number) for number in range(len(plan.stages))) <= 10


def test_nodes_without_costs_are_refused():
    with pytest.raises(PlanError, match="needs nodes that take time"):
        plan_graph(chain_of([Node("a", 0, 0), Node("b", 0, 0)]), Limits(devices=2, micro_batches=2))


def large(seed=0):
    """200 nodes in four branches."""
    generator, nodes, edges, ends = random.Random(seed), [Node("stem", 1e-3, 2e-3, 10, 10)], [], []
    for branch in range(4):
        before = 0
        for place in range(49):
            seconds = generator.uniform(0.5, 1.5) * 1e-3
            nodes.append(Node(f"{branch}.{place}", seconds, 2 * seconds, 100, 50))
            edges.append((before, len(nodes) - 1))
            before = len(nodes) - 1
        ends.append(before)
    for place in range(3):
        nodes.append(Node(f"end.{place}", 3e-3, 6e-3, 100, 50))
        edges += [(end, len(nodes) - 1) for end in ends]
        ends = [len(nodes) - 1]
    return ComputationGraph(tuple(nodes), tuple(edges))


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"max_width": 1}, {"memory_bytes": 20_000}], ids=str)
def test_two_hundred_nodes_take_seconds(limits):
    started = time.process_time()
    plan = plan_graph(large(), Limits(devices=32, micro_batches=64, **limits))
    assert time.process_time() - started < 10  # seconds of the processor; a clock would count other programs
    assert plan.devices == 32


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_seconds():
    started = time.process_time()
    with pytest.raises(PlanError, match="fits into"):
        plan_graph(large(), Limits(devices=32, micro_batches=64, memory_bytes=1_000))
    assert time.process_time() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_kinds_of_networks_of_the_paper_gain(name):
    limits = Limits(devices=16, micro_batches=32, max_width=1)
    graph = EXAMPLES[name]()
    assert predict(plan_chain(graph, limits)).seconds / predict(plan_graph(graph, limits)).seconds > 1.1


@pytest.mark.parametrize("name", ["devices", "micro_batches", "memory_bytes", "group", "max_width"])
def test_limits_must_be_positive(name):
    with pytest.raises(ArgumentError, match=f"{name} must be at least 1, got 0"):
        Limits(**{"devices": 1, "micro_batches": 1, name: 0})
