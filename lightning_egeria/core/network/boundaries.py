"""Finding the boundaries that cut a network into layer modules, from the trace of one training step."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_egeria.core.network.tracing import ModuleCall, StepTrace, leaf_of, walk
from lightning_egeria.errors import LayerChainError, TooFewLayersError, first_of


class Boundary(NamedTuple):
    """Where a layer module ends: at the output of each call of one module, such as both of a siamese network.

    Attributes:
        name: of the layer module.
        calls: in the order of completion; at least one.
    """

    name: str
    calls: tuple[ModuleCall, ...]

    @property
    def path(self) -> str:
        """Path of the module that is called."""
        return self.calls[0].path

    @property
    def end(self) -> int:
        """Place of the last call in the order of completion."""
        return self.calls[-1].end

    def nodes_in(self, graph: set[Node]) -> list[Node]:
        """Return the autograd nodes of all outputs that are part of ``graph``."""
        return [node for call in self.calls for node in call.nodes_in(graph)]


def _has_weights(module: nn.Module) -> bool:
    """Whether the module holds more than normalisation: a parameter of at least two dimensions."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def trainable_leaves(nodes: list[Node]) -> list[nn.Parameter]:
    """Return the parameters among the leaves, each once, even if autocast added a cast of it to the graph."""
    return list(dict.fromkeys(leaf for node in nodes if isinstance(leaf := leaf_of(node), nn.Parameter)))


def _feeds(first: ModuleCall, second: ModuleCall, barrier: set[Node]) -> bool:
    """Whether ``second`` uses the output of ``first`` on a path that does not cross ``barrier``."""
    targets = set(first.nodes)
    seen = set(second.nodes)
    queue = list(seen)
    for node in queue:
        if node in targets:
            return True
        if node not in barrier:
            new = [upstream for upstream, _ in node.next_functions if upstream is not None and upstream not in seen]
            seen.update(new)
            queue.extend(new)
    return False


def _is_stack(call: ModuleCall) -> bool:
    """Whether the module runs the elements of its module list one after the other (a transformer encoder)."""
    for child in call.module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            inside = set(child.children())
            elements = [c for c in call.children if c.module in inside and _has_weights(c.module) and c.nodes]
            if len(elements) > 1 and all(_feeds(a, b, set()) for a, b in itertools.pairwise(elements)):
                return True
    return False


def _expand(call: ModuleCall, always: bool = False) -> list[ModuleCall]:
    """Return ``call``, or the calls of its children if the module is only a container."""
    if not any(_has_weights(child.module) for child in call.children):
        return [call]
    container = isinstance(call.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    if always or call.parent is None or container or _is_stack(call):
        return [part for child in call.children for part in _expand(child)]
    return [call]


def find_boundaries(trace: StepTrace, graph: set[Node]) -> list[Boundary]:
    """Return the boundaries found in the trace. The last module with weights is the head, not a layer module."""
    items = _once(graph, (part for root in trace.roots if root.nodes_in(graph) for part in _expand(root)))
    sizes = {call: sum(p.numel() for p in call.module.parameters()) for call in items}
    while sizes:
        largest = max(sizes, key=lambda call: sizes[call])
        if sizes[largest] * 2 <= sum(sizes.values()):
            break
        # One module that holds most of the network is a wrapper around it: look inside. A large module without children
        # (a head, an embedding) leaves the comparison, or it would hide such a wrapper.
        del sizes[largest]
        parts = _once(graph, _expand(largest, always=True))
        if parts != [largest]:
            position = items.index(largest)
            items[position : position + 1] = parts
            sizes.update({call: sum(p.numel() for p in call.module.parameters()) for call in parts})
    return _group(trace, graph, items)[:-1]


def _once(graph: set[Node], calls: Iterable[ModuleCall]) -> list[ModuleCall]:
    """The first call of each module that the loss follows from."""
    found: dict[str, ModuleCall] = {}
    for call in calls:
        if call.nodes_in(graph):
            found.setdefault(call.path, call)
    return list(found.values())


def _calls_of(trace: StepTrace, graph: set[Node]) -> dict[str, tuple[ModuleCall, ...]]:
    """The calls of each module that the loss follows from: not those of a model that is its own teacher."""
    found: dict[str, list[ModuleCall]] = {}
    for call in trace.calls:
        if call.nodes_in(graph):
            found.setdefault(call.path, []).append(call)
    return {path: tuple(calls) for path, calls in found.items()}


def _group(trace: StepTrace, graph: set[Node], items: list[ModuleCall]) -> list[Boundary]:
    """Add normalisation and modules without parameters to the layer module before them."""
    calls_of = _calls_of(trace, graph)
    visited: set[Node] = set()
    used: set[nn.Parameter] = set()
    groups: list[Boundary] = []
    for call in items:
        calls = calls_of[call.path]
        # A module that is called more often, such as one activation for all layers, belongs to none of them.
        joins = bool(groups) and len(groups[-1].calls) == len(calls)
        joins = joins and all(_feeds(*pair, visited) for pair in zip(groups[-1].calls, calls, strict=True))
        # Autocast without its cache casts a weight again for each use, and each cast counts as the weight.
        leaves = set(trainable_leaves(walk(call.nodes_in(graph), visited))) - used
        used |= leaves
        if _has_weights(call.module) and leaves:
            groups.append(Boundary(call.path, calls))
        elif joins:
            groups[-1] = Boundary(groups[-1].name, calls)
    return groups


def named_boundaries(trace: StepTrace, graph: set[Node], names: list[str]) -> list[Boundary]:
    """Return the boundaries that the user named.

    Raises:
        LayerChainError: if a name is unknown, or the names are not in execution order.
        TooFewLayersError: if the loss does not depend on a named module.
    """
    paths = {part: path for path, part in trace.module.named_modules()}
    known = {path: paths[part] for path, part in trace.module.named_modules(remove_duplicate=False) if path}
    calls_of = _calls_of(trace, graph)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            ending = [path for path in known if path.endswith(f".{name}")]
            hint = ", ".join(repr(path) for path in dict.fromkeys([*ending, *near])) or repr(list(known)[:5])
            raise LayerChainError(f"layer_modules: the model has no module {name!r}. Did you mean {hint}?")
        if known[name] not in calls_of:
            raise TooFewLayersError(
                f"layer_modules: the loss of the first training step does not depend on {name!r}, or no trainable "
                "parameter lies before its output. Name modules that the step calls"
            )
    names = [known[name] for name in names]  # a module may have several names; the trace knows the first
    in_order = sorted(set(names), key=lambda name: calls_of[name][0].end)
    if names != in_order:
        raise LayerChainError(
            f"layer_modules must be in execution order without repetition, expected {in_order}, got {names}"
        )
    return [Boundary(name, calls_of[name]) for name in names]


def _places(graph: set[Node], boundaries: list[Boundary]) -> dict[Node, int]:
    """Index of the first layer module whose boundary depends on each node; ``len(boundaries)`` if none does."""
    place = dict.fromkeys(graph, len(boundaries))
    visited: set[Node] = set()
    for index, boundary in enumerate(boundaries):
        for node in walk(boundary.nodes_in(graph), visited):
            place[node] = index
    return place


def last_uses(graph: set[Node], boundaries: list[Boundary]) -> list[int]:
    """Return the index of the last layer module that reads the output of each; ``len(boundaries)`` for the loss.

    A node between two boundaries belongs to every layer module whose boundary or weights it depends on.
    """
    place = _places(graph, boundaries)
    ends = {node: index for index, boundary in enumerate(boundaries) for node in boundary.nodes_in(graph)}
    last = [index + 1 for index in range(len(boundaries))]
    origins: dict[Node, frozenset[int]] = {}
    for node in _upstream_first(graph):
        index = place[node]
        found: set[int] = set()
        for upstream, _ in node.next_functions:
            if upstream is None or upstream not in graph:
                continue
            if isinstance(leaf_of(upstream), nn.Parameter):
                found |= {index} - {len(boundaries)}
            found |= origins[upstream]
        for origin in found:
            last[origin] = max(last[origin], index)
        origins[node] = frozenset({ends[node]}) if node in ends else frozenset(found)
    return last


def _upstream_first(graph: set[Node]) -> list[Node]:
    """Return the nodes in topological order: each after the nodes that it depends on."""
    waits = dict.fromkeys(graph, 0)
    users: dict[Node, list[Node]] = {node: [] for node in graph}
    for node in graph:
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream in waits:
                waits[node] += 1
                users[upstream].append(node)
    order = [node for node, count in waits.items() if count == 0]
    for node in order:
        for user in users[node]:
            waits[user] -= 1
            if waits[user] == 0:
                order.append(user)
    return order


def separate_shared_weights(
    trace: StepTrace, graph: set[Node], boundaries: list[Boundary]
) -> tuple[list[Boundary], int, list[str]]:
    """Drop boundaries between two uses of one weight, and between two calls of an earlier boundary's module.

    A weight with uses on both sides of a boundary would have to be frozen and trained at once. If its last use is in a
    later layer module, all layer modules up to there freeze together. If its last use is in or behind the head, the
    layer module with its first use never freezes.

    Returns:
        The other boundaries, the largest depth, and notes.
    """
    beyond = len(boundaries)
    place = _places(graph, boundaries)
    uses: dict[nn.Parameter, tuple[int, int]] = {}
    for node in graph:
        for upstream, _ in node.next_functions:
            leaf = leaf_of(upstream) if upstream is not None else None
            if isinstance(leaf, nn.Parameter):
                first, last = uses.get(leaf, (beyond, -1))
                uses[leaf] = (min(first, place[node]), max(last, place[node]))
    shared: dict[tuple[int, int], set[Tensor]] = {}
    for leaf, span in uses.items():
        if span[0] < span[1]:
            shared.setdefault(span, set()).add(leaf)
    cut = [False] * beyond
    limit = beyond
    notes: list[str] = []
    for (first, last), leaves in sorted(shared.items(), key=lambda item: item[0]):
        names = [name for parameter, name in trace.parameter_names.items() if parameter in leaves]
        label, start = first_of(names) if names else "a weight", boundaries[first].name
        if last < beyond:
            notes.append(f"{start!r} to {boundaries[last].name!r} share {label} and freeze together")
            cut[first:last] = [True] * (last - first)
        elif first < limit:
            notes.append(
                f"{label} is used in {start!r} and again behind the last layer module (tied weights, a module called "
                f"twice, or a penalty on weights). Nothing from {start!r} on can freeze, unless you freeze or untie it"
            )
            limit = first
    ends, placed = {last for _, last in uses.values()}, set(place.values())
    for index, boundary in enumerate(boundaries):
        if index in ends or (index in placed and boundary.path == boundary.name):  # a named one may have no weights
            continue
        inner = next(call for call in trace.calls if call.path == boundary.name and call.nodes_in(graph))
        around = boundaries[place[inner.nodes_in(graph)[0]]].name
        notes.append(f"{boundary.name!r} runs between two calls of {around!r} and freezes with it")
        cut[index] = True
    kept = [boundary for index, boundary in enumerate(boundaries) if not cut[index]]
    return kept, sum(not cut[index] for index in range(limit)), notes
