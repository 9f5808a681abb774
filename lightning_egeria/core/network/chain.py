"""The layer chain of a model, found from one training step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_egeria.core.network.belonging import Members, Units, keeps_its_mode
from lightning_egeria.core.network.boundaries import (
    Boundary,
    find_boundaries,
    last_uses,
    named_boundaries,
    separate_shared_weights,
    trainable_leaves,
)
from lightning_egeria.core.network.tracing import StepTrace, walk
from lightning_egeria.errors import ArgumentError, LayerChainError, TooFewLayersError, first_of
from lightning_egeria.upstream.torch import is_reentrant_checkpoint


@dataclasses.dataclass(frozen=True)
class LayerModule:
    """One unit that freezes.

    Attributes:
        name: path of the first module with weights.
        boundary: path of the module whose output is the boundary activation, such as a pooling layer behind a stem.
        output_leaf: index of the boundary activation among the tensors of that output.
        members: paths of all modules that freeze with it.
        parameters: names of the trainable parameters that belong to it, also of those that the step did not train.
        units: paths of the outermost module calls that make it up, in order; the last ends at the boundary.
        last_use: index of the last layer module that reads its output; ``len(chain)`` if the loss does. Usually the
            next one.
        left_out: whether the traced step left it out, as layer drop does.
    """

    name: str
    boundary: str
    output_leaf: int
    members: tuple[str, ...]
    parameters: tuple[str, ...]
    units: tuple[str, ...]
    last_use: int
    left_out: bool = False


@dataclasses.dataclass(frozen=True)
class LayerChain:
    """All layer modules in execution order, without the head.

    Attributes:
        layer_modules: front to back; the prefix of depth ``k`` is the first ``k``.
        entries: paths of the modules that the training step calls directly and that hold a boundary. Usually just the
            network; ``""`` is the whole module.
        max_depth: largest depth that may freeze. The last layer module never does.
        notes: messages for the user, such as shared weights that cannot freeze.
        absent: names of trainable parameters that took no part in the traced step and belong to no layer module, such
            as those of a layer that is left out at random.

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
    absent: tuple[str, ...] = ()

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
        """Trace ``step()`` once, without compilation, and return the chain.

        Args:
            module: the model.
            step: runs one training step on ``module`` and returns the loss.
            layer_modules: paths of the layer modules in execution order; None finds them.

        Raises:
            LayerChainError: as for `from_trace`.
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
        """Return the chain from a traced forward and its loss, before the backward frees the graph.

        Args:
            trace: trace of the forward, stopped.
            loss: scalar tensor with a ``grad_fn``.
            layer_modules: paths of the layer modules in execution order; None finds them.

        Raises:
            LayerChainError: if the loss depends on no parameter, a name is unknown, the names are not in execution
                order, or the model uses reentrant checkpointing.
            TooFewLayersError: if fewer than two layer modules are trainable so far, or the loss does not depend on a
                named one.
        """
        if loss.grad_fn is None:
            raise LayerChainError(
                "the loss of the first training step depends on no trainable parameter. Return a loss that requires a "
                "gradient"
            )
        graph: set[Node] = set()
        walk([loss.grad_fn], graph)
        if any(map(is_reentrant_checkpoint, graph)):
            raise LayerChainError(
                "reentrant activation checkpointing loses all gradients once the front is frozen. Pass "
                "use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        if layer_modules is None:
            boundaries = find_boundaries(trace, graph)
        else:
            boundaries = named_boundaries(trace, graph, list(layer_modules))
        boundaries, max_depth, notes = separate_shared_weights(trace, graph, boundaries)
        if len(boundaries) < 2:
            found = f"1 layer module ({boundaries[0].name!r})" if boundaries else "no layer modules"
            raise TooFewLayersError(
                f"{type(trace.module).__name__} has {found}, expected at least 2. Name them with layer_modules=[...]"
                + "".join(f". {note}" for note in notes)
            )
        entries = dict.fromkeys(call.root.path for boundary in boundaries for call in boundary.calls)
        described = _describe(trace, graph, boundaries)
        absent = _absent(trace, graph, described)
        chain = cls(described, tuple(entries), min(max_depth, len(boundaries) - 1), tuple(notes), absent)
        return chain if layer_modules is not None else _with_left_out(chain, trace.module)

    def prefix_parameters(self, depth: int) -> tuple[str, ...]:
        """Return the names of the trainable parameters in the first ``depth`` layer modules."""
        return tuple(name for layer_module in self.layer_modules[:depth] for name in layer_module.parameters)

    def parameters_of(self, module: nn.Module, depth: int) -> dict[str, nn.Parameter]:
        """Return the parameters of `prefix_parameters` by name, as the model has them now."""
        return {name: module.get_parameter(name) for name in self.prefix_parameters(depth)}

    def check_depth(self, depth: int) -> None:
        """Check the length of a prefix.

        Raises:
            ArgumentError: if ``depth`` is not in ``0 .. max_depth``.
        """
        if not 0 <= depth <= self.max_depth:
            raise ArgumentError(f"depth must be in 0..{self.max_depth}, got {depth}")

    def members(self, depth: int) -> list[str]:
        """Return the paths of all modules that freeze with the first ``depth`` layer modules."""
        return [path for layer_module in self.layer_modules[:depth] for path in layer_module.members]

    def of_prefixes(self, values: Sequence[float], depth: int) -> tuple[float, ...]:
        """For each prefix, return the largest value of its layer modules whose output something behind it reads.

        In a plain chain this is the prefix's last layer module. With two towers, skip connections, or an encoder that
        every decoder layer reads, earlier ones count too.

        Args:
            values: one value per layer module, front to back.
            depth: number of frozen layer modules. Their values stay, and do not count for longer prefixes.
        """
        found = list(values)
        passing: list[int] = []  # layer modules whose output something behind ``index`` reads
        for index in range(depth, len(found)):
            passing = [earlier for earlier in passing if self.layer_modules[earlier].last_use > index]
            found[index] = max(values[earlier] for earlier in (*passing, index))
            passing.append(index)
        return tuple(found)

    def inserted(self, layer: LayerModule, place: int) -> LayerChain:
        """Return the chain with another layer module at index ``place``, of parameters that are `absent`."""
        moved = []
        for index, one in enumerate(self.layer_modules):
            # The layer module in front of the new one is read by that, not by the next.
            shift = one.last_use > place or (one.last_use == place and index < place - 1)
            moved.append(dataclasses.replace(one, last_use=one.last_use + shift))
        return dataclasses.replace(
            self,
            layer_modules=(*moved[:place], layer, *moved[place:]),
            max_depth=self.max_depth + (place <= self.max_depth),
            absent=tuple(name for name in self.absent if name not in layer.parameters),
        )

    def extended(self, module: nn.Module, names: Mapping[str, int]) -> LayerChain:
        """Return the chain with `absent` parameters that turned out to belong to a layer module, and their modules.

        Args:
            module: the model.
            names: index of the layer module, by the name of the parameter.
        """
        own = {one for name, one in module.named_parameters() if name in names}
        known = set(self.members(len(self)))
        layer_modules = list(self.layer_modules)
        for index in sorted(set(names.values())):
            new = [name for name, place in names.items() if place == index]
            members = [
                path
                for path, part in module.named_modules()
                if path not in known
                and (parameters := set(part.parameters()))
                and parameters <= own
                and any(name.startswith(f"{path}.") for name in new)
            ]
            parts = (part for path in members for part, _ in module.get_submodule(path).named_modules(prefix=path))
            layer_modules[index] = dataclasses.replace(
                layer_modules[index],
                parameters=(*layer_modules[index].parameters, *new),
                members=(*layer_modules[index].members, *dict.fromkeys(path for path in parts if path not in known)),
            )
        absent = tuple(name for name in self.absent if name not in names)
        return dataclasses.replace(self, layer_modules=tuple(layer_modules), absent=absent)

    def over_left_out(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return plasticity with that of the layer module before for those that were left out and never run.

        Args:
            values: plasticity of each layer module; NaN where it was not measured.
        """
        found = list(values)
        for index, layer_module in enumerate(self.layer_modules):
            if layer_module.left_out and index and math.isnan(found[index]):
                found[index] = found[index - 1]
        return tuple(found)

    def contradiction(self, module: nn.Module, trained: Collection[str] | None = None) -> str | None:
        """Compare the chain, which comes from a checkpoint, with a model in which nothing is frozen yet.

        Args:
            module: the model.
            trained: names of the parameters that trained when the chain was stored; None if that is not known.

        Returns:
            In words, what the model lacks, or which parameters do not train any more; None if there is nothing like
            that. What trains in addition may be held back before the first step.
        """
        parameters = dict(module.named_parameters())
        modules = {path for path, _ in module.named_modules()}
        missing = [name for name in self.prefix_parameters(len(self)) if name not in parameters]
        missing += [
            path for m in self.layer_modules for path in (m.boundary, *m.members, *m.units) if path not in modules
        ]
        missing += [path for path in self.entries if path not in modules]
        if missing:
            return f"{type(module).__name__} lacks {first_of(missing)}"
        if trained is None:
            return None
        train = [name for name, parameter in parameters.items() if parameter.requires_grad]
        if still := [name for name in trained if name not in train]:
            return f"{first_of(still)} trained when the checkpoint was written, and does not now"
        return None

    def to_state(self) -> dict[str, Any]:
        """Return the chain in plain types, for a checkpoint. `from_state` is the inverse."""
        return {
            "layer_modules": [
                {key: list(value) if isinstance(value, tuple) else value for key, value in vars(layer_module).items()}
                for layer_module in self.layer_modules
            ],
            "entries": list(self.entries),
            "max_depth": self.max_depth,
            "notes": list(self.notes),
            "absent": list(self.absent),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LayerChain:
        """Return the chain from the output of `to_state`."""
        layer_modules = []
        for entry in state["layer_modules"]:
            fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
            layer_modules.append(LayerModule(**fields))
        entries, notes, absent = (tuple(state.get(key, ())) for key in ("entries", "notes", "absent"))
        return cls(tuple(layer_modules), entries, state["max_depth"], notes, absent)


def _absent(trace: StepTrace, graph: set[Node], described: Sequence[LayerModule]) -> tuple[str, ...]:
    """Names of the trainable parameters that the loss does not follow from, and that belong to no layer module."""
    known = {trace.parameter_names.get(leaf, "") for leaf in trainable_leaves(list(graph))}
    known.update(name for layer_module in described for name in layer_module.parameters)
    return tuple(name for name, one in trace.parameters.items() if one.requires_grad and name not in known)


def _with_left_out(chain: LayerChain, module: nn.Module) -> LayerChain:
    """Return the chain with the layers that the traced step left out of a stack, as layer drop and stochastic depth do.

    A stack is a list of which at least two elements are layer modules, in the order of the list. An element of the same
    class, all of whose parameters took no part, is one too, in its place.
    """
    for path, stack in module.named_modules():
        if not isinstance(stack, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        names = [f"{path}.{name}" if path else name for name, _ in stack.named_children()]
        there = {name: index for index, name in enumerate(chain.names) if name in names}
        if len(there) < 2 or list(there) != [name for name in names if name in there]:
            continue
        for name in names:
            part = module.get_submodule(name)
            own = [f"{name}.{inner}" for inner, one in part.named_parameters() if one.requires_grad]
            alike = [other for other in there if type(module.get_submodule(other)) is type(part)]
            if name in there or not own or not alike or not set(own) <= set(chain.absent):
                continue
            behind = [other for other in names[names.index(name) + 1 :] if other in there]
            place = there[behind[0]] if behind else max(there.values()) + 1
            model = chain.layer_modules[there[alike[0]]]
            boundary = name + model.boundary.removeprefix(model.name) if _is_in(model.boundary, model.name) else name
            inner = [path for path, inner in part.named_modules(prefix=name) if not keeps_its_mode(inner)]
            layer = LayerModule(name, boundary, model.output_leaf, tuple(inner), tuple(own), (name,), place + 1, True)
            chain = chain.inserted(layer, place)
            there = {other: index + (index >= place) for other, index in there.items()} | {name: place}
    return chain


def _is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _describe(trace: StepTrace, graph: set[Node], boundaries: list[Boundary]) -> tuple[LayerModule, ...]:
    """Return the layer modules with their parameters, members and units."""
    names = trace.parameter_names
    trained = {names[leaf] for leaf in trainable_leaves(list(graph)) if leaf in names}
    upstream: set[Node] = set()
    members, units = Members(trace, graph), Units(trace, graph)
    described = []
    for boundary, last_use in zip(boundaries, last_uses(graph, boundaries), strict=True):
        new = walk(boundary.nodes_in(graph), upstream)
        own = members.up_to(boundary, upstream)
        leaves = [*trainable_leaves(new), *members.unused(own, names, trained)]
        parameters = dict.fromkeys(names[leaf] for leaf in leaves if leaf in names)
        trained.update(parameters)
        described.append(
            LayerModule(
                name=boundary.name,
                boundary=boundary.path,
                output_leaf=next(i for i, node in enumerate(boundary.calls[0].outputs) if node in graph),
                members=tuple(own),
                parameters=tuple(parameters),
                units=units.up_to(boundary, upstream),
                last_use=last_use,
            )
        )
    return tuple(described)
