"""Taking a graph apart into series and parallels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from lightning_egeria.methods.pipelining.graph import ComputationGraph, bits, members

MOST_CUTS = 500  # looked at where the graph is not series-parallel


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One node."""

    node: int

    @property
    def nodes(self) -> tuple[int, ...]:
        """Its number."""
        return (self.node,)


@dataclasses.dataclass(frozen=True)
class Series:
    """Parts that run one after the other: each node of a part comes before each node of the next."""

    parts: tuple[Leaf | Parallel, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of all its nodes."""
        return tuple(node for part in self.parts for node in part.nodes)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Parts that may run at once: no node of a part depends on one of another."""

    parts: tuple[Leaf | Series, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of all its nodes."""
        return tuple(node for part in self.parts for node in part.nodes)


Tree = Leaf | Series | Parallel


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A graph as a tree of series and parallels.

    Attributes:
        tree: the tree.
        serialised: pairs of nodes that are independent in the graph and in series in the tree; none if the graph is
            series-parallel.
    """

    tree: Tree
    serialised: tuple[tuple[int, int], ...]


def decompose(graph: ComputationGraph) -> Decomposition:
    """Return a graph as series and parallels, by which node depends on which.

    The definition is that of Valdes, Tarjan and Lawler: The recognition of series parallel digraphs, 1982.
    Where neither a series nor a parallel is left, the graph is cut in two so that the first part runs before the
    second. The cut that puts the fewest independent pairs in series wins, among all cuts of a small graph and among
    those along four orders of a large one.

    >>> from lightning_egeria.methods.pipelining.graph import Node
    >>> nodes = tuple(Node(name, 1, 2) for name in "abcd")
    >>> decompose(ComputationGraph(nodes, ((0, 1), (0, 2), (1, 3), (2, 3)))).tree
    Series(parts=(Leaf(node=0), Parallel(parts=(Leaf(node=1), Leaf(node=2))), Leaf(node=3)))
    """
    return _Decomposer(graph).decomposition()


class _Decomposer:
    def __init__(self, graph: ComputationGraph) -> None:
        self._count = len(graph.nodes)
        self._before = graph.before
        after = [0] * self._count
        for node, ancestors in enumerate(graph.before):
            for ancestor in members(ancestors):
                after[ancestor] |= 1 << node
        self._comparable = [earlier | later for earlier, later in zip(graph.before, after, strict=True)]
        self._after = after
        self._serialised: list[tuple[int, int]] = []

    def decomposition(self) -> Decomposition:
        tree = self._tree((1 << self._count) - 1)
        return Decomposition(tree, tuple(sorted(self._serialised)))

    def _tree(self, mask: int) -> Tree:
        if mask & (mask - 1) == 0:
            return Leaf(mask.bit_length() - 1)
        parts = self._components(mask, lambda node: self._comparable[node])
        if len(parts) > 1:
            trees = [self._tree(part) for part in parts]
            return Parallel(tuple(tree for tree in trees if not isinstance(tree, Parallel)))
        parts = self._components(mask, lambda node: ~self._comparable[node])
        if len(parts) == 1:
            parts = self._cut(mask)
        else:
            # In a series, a node of an earlier part has fewer nodes of the whole before it than one of a later part.
            parts.sort(key=lambda part: min((self._before[node] & mask).bit_count() for node in members(part)))
        series: list[Leaf | Parallel] = []
        for part in parts:
            tree = self._tree(part)
            series.extend(tree.parts if isinstance(tree, Series) else [tree])
        return Series(tuple(series))

    def _components(self, mask: int, neighbours: Callable[[int], int]) -> list[int]:
        found, left = [], mask
        while left:
            part = frontier = left & -left
            while frontier:
                reached = 0
                for node in members(frontier):
                    reached |= neighbours(node)
                frontier = reached & mask & ~part
                part |= frontier
            found.append(part)
            left &= ~part
        return found

    def _cut(self, mask: int) -> list[int]:
        """Return the two parts of the cut that puts the fewest independent pairs in series."""
        best, fewest = 0, float("inf")
        for front in self._fronts(mask):
            back = mask & ~front
            pairs = sum((back & ~self._comparable[node]).bit_count() for node in members(front))
            if pairs < fewest:
                best, fewest = front, pairs
        back = mask & ~best
        self._serialised += [
            (node, other) for node in members(best) for other in members(back & ~self._comparable[node])
        ]
        return [best, back]

    def _fronts(self, mask: int) -> list[int]:
        """Return sets of nodes with all their ancestors: each of them if they are few, else those along four orders."""
        found, queue = {0}, [0]
        for front in queue:
            for node in members(mask & ~front):
                larger = front | 1 << node
                if self._before[node] & mask & ~front == 0 and larger not in found:
                    found.add(larger)
                    queue.append(larger)
            if len(found) > MOST_CUTS:
                return list(self._prefixes(mask))
        return [front for front in queue if front not in (0, mask)]

    def _prefixes(self, mask: int) -> Iterator[int]:
        early = self._longest(mask, self._before)
        late = {node: -length for node, length in self._longest(mask, self._after).items()}
        keys: list[Callable[[int], tuple[int, ...]]] = [
            lambda node: (early[node], late[node]),
            lambda node: (late[node], early[node]),
            lambda node: (node,),
            lambda node: ((self._before[node] & mask).bit_count(), node),
        ]
        for key in keys:
            front = 0
            for node in sorted(members(mask), key=key)[:-1]:
                front |= 1 << node
                yield front

    def _longest(self, mask: int, towards: tuple[int, ...] | list[int]) -> dict[int, int]:
        """Return the length of the longest path from each node."""
        lengths: dict[int, int] = {}
        for node in sorted(members(mask), key=lambda node: (towards[node] & mask).bit_count()):
            lengths[node] = max((lengths[other] + 1 for other in members(towards[node] & mask)), default=0)
        return lengths


def is_contiguous(tree: Tree, nodes: tuple[int, ...]) -> bool:
    """Whether nodes are a run of consecutive parts of one series, or several parts of one parallel.

    Only such nodes become a stage.
    """
    wanted = bits(nodes)
    here = bits(tree.nodes)
    if wanted == here:
        return True
    if wanted & ~here or isinstance(tree, Leaf):
        return False
    inside = [part for part in tree.parts if bits(part.nodes) & wanted]
    if len(inside) == 1:
        return is_contiguous(inside[0], nodes)
    if any(bits(part.nodes) & ~wanted for part in inside):
        return False
    places = [tree.parts.index(part) for part in inside]
    return isinstance(tree, Parallel) or places == list(range(places[0], places[-1] + 1))
