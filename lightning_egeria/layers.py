"""The layer chain of a model, found from one training step, and the frozen prefix of it."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_egeria.errors import CheckpointError, LayerChainError
from lightning_egeria.tracing import ModuleCall, StepTrace, leaf_of, walk


@dataclasses.dataclass(frozen=True)
class LayerModule:
    """One unit that freezes.

    Attributes:
        name: path of its first module that holds weights.
        boundary: path of the module whose output is the boundary activation (a pooling layer behind a stem, say).
        output_leaf: which tensor of that output, counted over its nested leaves.
        members: paths of all modules that freezing switches to evaluation mode.
        parameters: names of the trainable parameters that this layer module adds to the prefix.
    """

    name: str
    boundary: str
    output_leaf: int
    members: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LayerChain:
    """All layer modules in execution order, without the head.

    Attributes:
        layer_modules: front to back; the prefix of depth ``k`` is the first ``k``.
        entries: paths of the modules that the training step itself calls and that hold a boundary; mostly just one,
            the network, or ``""`` for the whole module.
        max_depth: the deepest prefix that may freeze. The last layer module never does.
        notes: what the user should know of it: weights that are shared, say, and therefore never freeze.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> chain = LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum())
    >>> chain.names, chain.max_depth
    (('0', '2'), 1)
    >>> chain.layer_modules[0].boundary, chain.layer_modules[0].parameters
    ('1', ('0.weight', '0.bias'))
    """

    layer_modules: tuple[LayerModule, ...]
    entries: tuple[str, ...]
    max_depth: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.layer_modules)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layer modules, front to back."""
        return tuple(layer_module.name for layer_module in self.layer_modules)

    @classmethod
    def trace(
        cls, module: nn.Module, step: Callable[[], Tensor], layer_modules: Sequence[str] | None = None
    ) -> LayerChain:
        """Chain of ``module`` as ``step()`` runs it once, eagerly; ``step`` returns the loss.

        Raises:
            LayerChainError: as `from_trace`.
        """
        trace = StepTrace(module)
        trace.start()
        try:
            loss = step()
        finally:
            trace.stop()
        return cls.from_trace(trace, loss, layer_modules)

    @classmethod
    def from_trace(cls, trace: StepTrace, loss: Tensor, layer_modules: Sequence[str] | None = None) -> LayerChain:
        """Chain from a recorded forward and the loss it gave, before the backward has freed its graph.

        Args:
            trace: the stopped record of the forward.
            loss: scalar tensor with a ``grad_fn``.
            layer_modules: paths of the layer modules in execution order; None finds them.

        Raises:
            LayerChainError: the loss depends on no parameter, a name is unknown or was not called, the names are not in
                execution order, fewer than two layer modules were found, or reentrant checkpointing hides the graph.
        """
        if loss.grad_fn is None:
            raise LayerChainError(
                "the loss of the training step depends on no trainable parameter, so there is nothing to freeze"
            )
        graph: set[Node] = set()
        walk([loss.grad_fn], graph)
        if any(node.name().startswith("CheckpointFunctionBackward") for node in graph):
            raise LayerChainError(
                "reentrant activation checkpointing hides the layers from autograd, and loses all gradients once the "
                "front is frozen; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        if layer_modules is None:
            boundaries = _find_boundaries(trace, graph)
        else:
            boundaries = _named_boundaries(trace, graph, list(layer_modules))
        boundaries, max_depth, notes = _separate_shared_weights(trace.module, graph, boundaries)
        if len(boundaries) < 2:
            found = ", ".join(repr(name) for name, _ in boundaries) or "none"
            raise LayerChainError(
                f"at least two layer modules are needed, found {found} in {type(trace.module).__name__}"
                + "".join(f"; {note}" for note in notes)
                + ". If the network has more, name them with layer_modules=[...]"
            )
        entries = dict.fromkeys(_entry(call).path for _, call in boundaries)
        described = _describe(trace, graph, boundaries)
        return cls(described, tuple(entries), min(max_depth, len(boundaries) - 1), tuple(notes))

    def prefix_parameters(self, depth: int) -> tuple[str, ...]:
        """Names of the trainable parameters in the first ``depth`` layer modules."""
        return tuple(name for layer_module in self.layer_modules[:depth] for name in layer_module.parameters)

    def to_state(self) -> dict[str, Any]:
        """Plain types only, for a checkpoint. `from_state` is the inverse."""
        return {
            "layer_modules": [
                {key: list(value) if isinstance(value, tuple) else value for key, value in vars(layer_module).items()}
                for layer_module in self.layer_modules
            ],
            "entries": list(self.entries),
            "max_depth": self.max_depth,
            "notes": list(self.notes),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LayerChain:
        """Chain as `to_state` wrote it."""
        layer_modules = tuple(
            LayerModule(**{**entry, "members": tuple(entry["members"]), "parameters": tuple(entry["parameters"])})
            for entry in state["layer_modules"]
        )
        return cls(layer_modules, tuple(state["entries"]), state["max_depth"], tuple(state["notes"]))


class PrefixListener(Protocol):
    """What must hear of every freeze and unfreeze: the engine, and a cache of the prefix's outputs."""

    def prefix_changed(self, prefix: FrozenPrefix) -> None:
        """Called after ``prefix.depth`` and ``prefix.version`` have their new values."""


class FrozenPrefix:
    """The first `depth` layer modules of a model: without gradients, in evaluation mode, as the user left them after.

    The prefix is changed between two optimizer steps only, never inside a gradient accumulation window: a gradient that
    is there already would otherwise be applied to a weight that counts as frozen, or be lost.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> chain = LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum())
    >>> prefix = FrozenPrefix(net, chain)
    >>> prefix.set_depth(1)
    >>> prefix.version, net[0].weight.requires_grad, net[1].training, net[2].training
    (1, False, False, True)
    >>> prefix.set_depth(0)
    >>> prefix.version, net[0].weight.requires_grad, net[1].training
    (2, True, True)
    """

    def __init__(self, module: nn.Module, chain: LayerChain) -> None:
        self.module = module
        self.chain = chain
        self.depth = 0
        self.version = 0
        self.listeners: list[PrefixListener] = []
        self._frozen_parameters: list[nn.Parameter] = []
        self._training_before: list[tuple[nn.Module, bool]] = []

    def set_depth(self, depth: int) -> None:
        """Freeze or unfreeze so that exactly the first ``depth`` layer modules are frozen, and tell the listeners.

        Raises:
            ValueError: ``depth`` is not in ``0 .. chain.max_depth``.
        """
        if not 0 <= depth <= self.chain.max_depth:
            raise ValueError(f"depth must be in 0..{self.chain.max_depth}, got {depth}")
        if depth == self.depth:
            return
        self._thaw()
        parameters = dict(self.module.named_parameters())
        for name in self.chain.prefix_parameters(depth):
            parameter = parameters[name]
            parameter.grad = None  # a gradient left behind would go on moving it through momentum and weight decay
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen_parameters.append(parameter)
        self.depth = depth
        members = [path for layer_module in self.chain.layer_modules[:depth] for path in layer_module.members]
        modules = dict(self.module.named_modules())
        self._training_before = [(modules[path], modules[path].training) for path in members]
        self.assert_modes()
        self.version += 1
        for listener in self.listeners:
            listener.prefix_changed(self)

    def assert_modes(self) -> None:
        """Put the prefix back into evaluation mode, if something (``self.train()`` in a hook, say) took it out."""
        for module, _ in self._training_before:
            module.training = False

    def _thaw(self) -> None:
        for parameter in self._frozen_parameters:
            parameter.requires_grad_(True)
        for module, training in self._training_before:
            module.training = training
        self._frozen_parameters, self._training_before = [], []

    def check_fits(self) -> None:
        """Compare the chain, as read from a checkpoint, with the model.

        Raises:
            CheckpointError: the chain names modules or parameters that the model lacks.
        """
        parameters = {name for name, _ in self.module.named_parameters()}
        modules = {path for path, _ in self.module.named_modules()}
        missing = [name for name in self.chain.prefix_parameters(len(self.chain)) if name not in parameters]
        missing += [path for m in self.chain.layer_modules for path in (m.boundary, *m.members) if path not in modules]
        if missing:
            raise CheckpointError(
                f"the checkpoint's layer chain does not fit {type(self.module).__name__}: it lacks {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            )


_Boundary = tuple[str, ModuleCall]  # name of the layer module, the call whose output ends it


def _has_weights(module: nn.Module) -> bool:
    """Whether it holds more than normalisation: some parameter with two dimensions or more."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _trainable(nodes: list[Node]) -> list[nn.Parameter]:
    """Parameters among the leaves; each once, although autocast puts a cast of it into the graph too."""
    return list(dict.fromkeys(leaf for node in nodes if isinstance(leaf := leaf_of(node), nn.Parameter)))


def _feeds(first: ModuleCall, second: ModuleCall, barrier: set[Node]) -> bool:
    """Whether the output of ``first`` goes into ``second`` on a way that does not pass ``barrier`` otherwise."""
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
    """Whether it runs the elements of one of its own module lists one behind the other (a transformer encoder)."""
    for child in call.module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            inside = set(child.children())
            elements = [c for c in call.children if c.module in inside and _has_weights(c.module) and c.nodes]
            if len(elements) > 1 and all(_feeds(a, b, set()) for a, b in itertools.pairwise(elements)):
                return True
    return False


def _expand(call: ModuleCall, always: bool = False) -> list[ModuleCall]:
    """The calls that stand for ``call`` in the chain: its children where it is only a container of them."""
    if not any(_has_weights(child.module) for child in call.children):
        return [call]
    container = isinstance(call.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    if always or call.parent is None or container or _is_stack(call):
        return [part for child in call.children for part in _expand(child)]
    return [call]


def _find_boundaries(trace: StepTrace, graph: set[Node]) -> list[_Boundary]:
    """Boundaries without the user's help. The last weights are the head and no layer module."""
    items = [part for root in trace.roots if any(node in graph for node in root.nodes) for part in _expand(root)]
    sizes = {call: sum(p.numel() for p in call.module.parameters()) for call in items}
    while sizes:
        largest = max(sizes, key=lambda call: sizes[call])
        if sizes[largest] * 2 <= sum(sizes.values()):
            break
        # One module that holds most of the network is a wrapper around it, whatever its class: look inside. What has no
        # inside (a large head, an embedding) is left out of the comparison, or it would hide such a wrapper.
        del sizes[largest]
        parts = _expand(largest, always=True)
        if parts != [largest]:
            position = items.index(largest)
            items[position : position + 1] = parts
            sizes.update({call: sum(p.numel() for p in call.module.parameters()) for call in parts})
    return _group(trace, graph, items)[:-1]


def _group(trace: StepTrace, graph: set[Node], items: list[ModuleCall]) -> list[_Boundary]:
    """Let normalisation and modules without parameters join the layer module before them."""
    calls_of = Counter(call.path for call in trace.calls if any(node in graph for node in call.nodes))
    visited: set[Node] = set()
    groups: list[_Boundary] = []
    for call in items:
        nodes = [node for node in call.nodes if node in graph]
        if not nodes:
            continue
        joins = bool(groups) and calls_of[call.path] == 1 and _feeds(groups[-1][1], call, visited)
        new = walk(nodes, visited)
        if _has_weights(call.module) and _trainable(new):
            groups.append((call.path, call))
        elif joins:
            groups[-1] = (groups[-1][0], call)
    return groups


def _named_boundaries(trace: StepTrace, graph: set[Node], names: list[str]) -> list[_Boundary]:
    """Boundaries that the user named."""
    paths = {part: path for path, part in trace.module.named_modules()}
    known = {path: paths[part] for path, part in trace.module.named_modules(remove_duplicate=False) if path}
    # A later call under no_grad (of a model that is its own teacher) is not on the way to the loss.
    last_call = {call.path: call for call in trace.calls if any(node in graph for node in call.nodes)}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            ending = [path for path in known if path.endswith(f".{name}")]
            hint = ", ".join(repr(path) for path in dict.fromkeys([*ending, *near])) or repr(list(known)[:5])
            raise LayerChainError(f"layer_modules: there is no module {name!r}; did you mean {hint}?")
        if known[name] not in last_call:
            raise LayerChainError(
                f"layer_modules: {name!r} was not called on the way to the loss of this training step, or nothing that "
                "trains stands before its output"
            )
    names = [known[name] for name in names]  # a module may be reached by several names; the trace knows the first
    in_order = sorted(set(names), key=lambda name: last_call[name].end)
    if names != in_order:
        raise LayerChainError(f"layer_modules must be in execution order without repetition: {in_order}, got {names}")
    return [(name, last_call[name]) for name in names]


def _separate_shared_weights(
    module: nn.Module, graph: set[Node], boundaries: list[_Boundary]
) -> tuple[list[_Boundary], int, list[str]]:
    """Drop boundaries that cut a shared weight in two; returns those left, the deepest allowed depth and notes.

    A weight that is used on both sides of a boundary would have to be frozen and active at once. If its last use is in
    a later layer module, all up to there freeze together; if it is in or behind the head, its first use never freezes.
    """
    beyond = len(boundaries)
    place = dict.fromkeys(graph, beyond)
    visited: set[Node] = set()
    for index, (_, call) in enumerate(boundaries):
        for node in walk([node for node in call.nodes if node in graph], visited):
            place[node] = index
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
        names = [name for name, parameter in module.named_parameters() if parameter in leaves]
        label = (repr(names[0]) if names else "a weight") + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if last < beyond:
            notes.append(f"{boundaries[first][0]!r} to {boundaries[last][0]!r} share {label} and freeze together")
            cut[first:last] = [True] * (last - first)
        elif first < limit:
            notes.append(
                f"{label}: used both in {boundaries[first][0]!r} and behind the last layer module (tied weights, "
                "or a module that is called twice), so nothing from there on can freeze"
            )
            limit = first
    kept = [boundary for index, boundary in enumerate(boundaries) if not cut[index]]
    return kept, sum(not cut[index] for index in range(limit)), notes


def _describe(trace: StepTrace, graph: set[Node], boundaries: list[_Boundary]) -> tuple[LayerModule, ...]:
    """Parameters and members of each layer module."""
    names = {parameter: name for name, parameter in trace.module.named_parameters()}
    last_end: dict[str, int] = {}
    for root in trace.roots:
        if any(node in graph for node in root.nodes):
            for call in _subtree(root):
                last_end[call.path] = max(call.end, last_end.get(call.path, -1))
    visited: set[Node] = set()
    assigned: set[str] = set()
    described = []
    by_end = sorted(last_end.items(), key=lambda item: item[1])
    modules = dict(trace.module.named_modules())
    paths = {part: path for path, part in modules.items()}
    position = 0
    for name, boundary in boundaries:
        new = walk([node for node in boundary.nodes if node in graph], visited)
        members = []
        while position < len(by_end) and by_end[position][1] <= boundary.end:
            path = by_end[position][0]
            position += 1
            for part in modules[path].modules():
                inner = paths[part]
                # nn.TransformerEncoder takes the mode of its first layer for that of all, and would hand padded
                # batches as nested tensors to layers that still train; the parts of the layer suffice.
                if isinstance(part, nn.TransformerEncoderLayer):
                    continue
                # A part that is called again behind the boundary stays in the mode that its later use needs.
                if inner not in assigned and last_end.get(inner, -1) <= boundary.end:
                    assigned.add(inner)
                    members.append(inner)
        described.append(
            LayerModule(
                name=name,
                boundary=boundary.path,
                output_leaf=next(i for i, node in enumerate(boundary.outputs) if node in graph),
                members=tuple(members),
                parameters=tuple(names[leaf] for leaf in _trainable(new) if leaf in names),
            )
        )
    return tuple(described)


def _entry(call: ModuleCall) -> ModuleCall:
    while call.parent is not None:
        call = call.parent
    return call


def _subtree(call: ModuleCall) -> list[ModuleCall]:
    found = [call]
    for node in found:
        found.extend(node.children)
    return found
