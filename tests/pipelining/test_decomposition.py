"""Graphs as series and parallels, with as little as possible put in series that is not."""

import itertools

from lightning_egeria.methods.pipelining.decomposition import Leaf, Parallel, Series, decompose, is_contiguous
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node, bits, chain_of, members
from support.pipelining.graphs import branches, random_graph, series_parallel


def nodes(count):
    return tuple(Node(str(number), 1, 2) for number in range(count))


def order_of(tree):
    """Pairs of nodes of which the tree puts the first before the second."""
    if isinstance(tree, Leaf):
        return set()
    inside = set().union(*(order_of(part) for part in tree.parts))
    if isinstance(tree, Series):
        for first, second in itertools.combinations(tree.parts, 2):
            inside |= set(itertools.product(first.nodes, second.nodes))
    return inside


def order_in(graph):
    return {pair for pair in itertools.permutations(range(len(graph.nodes)), 2) if graph.is_before(*pair)}


def test_a_chain_is_one_series():
    assert decompose(chain_of(nodes(3))).tree == Series((Leaf(0), Leaf(1), Leaf(2)))


def test_towers_without_a_stem():
    graph = ComputationGraph(nodes(5), ((0, 1), (2, 3), (1, 4), (3, 4)))
    towers = Parallel((Series((Leaf(0), Leaf(1))), Series((Leaf(2), Leaf(3)))))
    assert decompose(graph).tree == Series((towers, Leaf(4)))


def test_a_skip_over_a_branch_changes_nothing():
    skipping = ComputationGraph(nodes(4), ((0, 1), (1, 2), (0, 2), (0, 3), (2, 3)))
    assert decompose(skipping).tree == decompose(chain_of(nodes(4))).tree


def test_a_series_parallel_graph_keeps_its_order():
    for seed in range(200):
        graph = series_parallel(seed, most=20)
        found = decompose(graph)
        assert found.serialised == ()
        assert order_of(found.tree) == order_in(graph)
        assert sorted(found.tree.nodes) == list(range(len(graph.nodes)))


def test_any_graph_adds_only_what_it_names():
    for seed in range(200):
        graph = random_graph(seed, most=12)
        found = decompose(graph)
        assert order_of(found.tree) == order_in(graph) | set(found.serialised)
        assert not order_in(graph) & set(found.serialised)


def test_the_smallest_graph_that_is_not_series_parallel():
    """a before c and d, b before d: one of three pairs must be put in series."""
    graph = ComputationGraph(nodes(4), ((0, 2), (0, 3), (1, 3)))
    assert len(decompose(graph).serialised) == 1


def test_a_large_one_is_cut_along_a_few_orders():
    """Ten chains of ten, each with an edge into the next: far more cuts than can be looked at."""
    edges = [(10 * chain + place, 10 * chain + place + 1) for chain in range(10) for place in range(9)]
    edges += [(10 * chain + 2, 10 * chain + 17) for chain in range(9)]
    graph = ComputationGraph(nodes(100), tuple(edges))
    found = decompose(graph)
    assert order_of(found.tree) == order_in(graph) | set(found.serialised)


def test_contiguous_nodes():
    """Stem 0, branches (1, 2) and (3, 4), end 5."""
    tree = decompose(branches(2, length=2)).tree
    contiguous = {mask for mask in range(1, 64) if is_contiguous(tree, tuple(members(mask)))}
    runs = [(0,), (1,), (2,), (1, 2), (3,), (4,), (3, 4), (5,)]
    whole = [(1, 2, 3, 4), (0, 1, 2, 3, 4), (1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)]
    assert contiguous == {bits(run) for run in runs + whole}
