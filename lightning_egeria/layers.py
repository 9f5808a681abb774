"""The layer chain of a model, found from one training step, and the frozen prefix of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_egeria.boundaries import (
    Boundary,
    find_boundaries,
    last_uses,
    named_boundaries,
    separate_shared_weights,
    trainable_leaves,
)
from lightning_egeria.errors import CheckpointError, LayerChainError, TooFewLayersError
from lightning_egeria.tracing import ModuleCall, StepTrace, walk

SETTLING_STEPS = 40  # after which 1.5 % of a running statistic is older than the freeze
SETTLING_MOMENTUM = 0.1


@dataclasses.dataclass(frozen=True)
class LayerModule:
    """One unit that freezes.

    Attributes:
        name: path of its first module that holds weights.
        boundary: path of the module whose output is the boundary activation (a pooling layer behind a stem, say).
        output_leaf: which tensor of that output, counted over its nested leaves.
        members: paths of all modules that freeze with it.
        parameters: names of the trainable parameters that this layer module adds to the prefix.
        units: paths of the calls that make it up, in order, none inside another; the last is that of the boundary. A
            step that takes the boundary activation from a cache leaves them out.
        last_use: number of the last layer module, counted from 0, that uses what this one computes; that of the head,
            ``len(chain)``, for the loss. Mostly the next one.
    """

    name: str
    boundary: str
    output_leaf: int
    members: tuple[str, ...]
    parameters: tuple[str, ...]
    units: tuple[str, ...]
    last_use: int


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
            TooFewLayersError: the one of these that is over when more parameters learn.
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
            boundaries = find_boundaries(trace, graph)
        else:
            boundaries = named_boundaries(trace, graph, list(layer_modules))
        boundaries, max_depth, notes = separate_shared_weights(trace, graph, boundaries)
        if len(boundaries) < 2:
            found = ", ".join(repr(name) for name, _ in boundaries) or "none"
            raise TooFewLayersError(
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

    def members(self, depth: int) -> list[str]:
        """Paths of all modules that freeze with the first ``depth`` layer modules."""
        return [path for layer_module in self.layer_modules[:depth] for path in layer_module.members]

    def of_prefixes(self, values: Sequence[float], depth: int) -> tuple[float, ...]:
        """For each prefix, the largest value of the layer modules that something behind the prefix uses.

        In a chain that is the last one of the prefix. Where there are ways around it (two towers, an encoder that every
        layer of the decoder looks at, skip connections), what they start from counts too.

        Args:
            values: one for each layer module from the front.
            depth: so many are frozen; their values are kept, and do not count for longer prefixes.
        """
        found = list(values)
        passing: list[int] = []  # layer modules that are used behind the one that comes next
        for index in range(depth, len(found)):
            passing = [earlier for earlier in passing if self.layer_modules[earlier].last_use > index]
            found[index] = max(values[earlier] for earlier in (*passing, index))
            passing.append(index)
        return tuple(found)

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
        layer_modules = []
        for entry in state["layer_modules"]:
            fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
            layer_modules.append(LayerModule(**fields))
        return cls(tuple(layer_modules), tuple(state["entries"]), state["max_depth"], tuple(state["notes"]))


class PrefixListener(Protocol):
    """What must hear of every freeze and unfreeze: the engine, and a cache of the prefix's outputs."""

    def prefix_changed(self, prefix: FrozenPrefix) -> None:
        """Called after ``prefix.depth`` and ``prefix.version`` have their new values."""


class StepListener(PrefixListener, Protocol):
    """What must also hear of every training step: a cache of the prefix's outputs."""

    def batch_begins(self, batch: Any) -> None:
        """A batch is there for the next training step. The prefix may still change before that begins."""

    def step_begins(self) -> bool:
        """The training step is about to run; returns whether the network will be given its real input."""

    def forward_ended(self) -> None:
        """Its forward is over."""

    def step_ended(self) -> None:
        """The batch is done. May come twice, or without the two before."""


@runtime_checkable
class PrefixOwner(Protocol):
    """What freezes: a cache finds it among the callbacks and has itself told of every step."""

    step_listeners: list[StepListener]

    def observes(self, batches_ahead: int) -> bool:
        """Whether the batch so many after the last one will be compared, and so needs the network's real input."""


class FrozenPrefix:
    """The first `depth` layer modules of a model: without gradients, and after that as the user left them.

    Modules that hold statistics or the like, floating-point buffers of their own or of their parts, are in evaluation
    mode while they are frozen, because they would go on changing. All others stay as they are: dropout in the front
    keeps what learns behind it from overfitting, frozen or not.

    Batch normalisation whose running statistics follow slowly (a momentum below 0.1; in torchvision, MobileNetV3 has
    0.01) still has those of weights of long ago when it freezes, and would normalise by them from then on. It goes to
    evaluation mode 40 optimizer steps later, in which its statistics follow with a momentum of 0.1. Outside of these
    steps it has its own momentum.

    The prefix is changed between two optimizer steps only, never inside a gradient accumulation window: a gradient that
    is there already would otherwise be applied to a weight that counts as frozen, or be lost.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> chain = LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum())
    >>> prefix = FrozenPrefix(net, chain)
    >>> prefix.set_depth(1)
    >>> prefix.version, net[0].weight.requires_grad, [part.training for part in net]
    (1, False, [True, False, True, True, True])
    >>> prefix.eval_all()
    >>> [part.training for part in net]
    [False, False, False, True, True]
    >>> prefix.set_depth(0)
    >>> prefix.version, net[0].weight.requires_grad, net[1].training
    (2, True, True)
    """

    def __init__(self, module: nn.Module, chain: LayerChain) -> None:
        self.module = module
        self.chain = chain
        self.depth = 0
        self.settled_depth = 0  # so many give the same each time from here on; fewer than ``depth`` for some steps
        self.version = 0
        self.listeners: list[PrefixListener] = []
        self._frozen_parameters: list[nn.Parameter] = []
        self._members: list[nn.Module] = []
        self._eval_all = False
        self._training_before: list[tuple[nn.Module, bool]] = []  # of the members that are in evaluation mode
        self._settling: dict[_BatchNorm, int] = {}  # for how many steps more
        self._momentum_before: dict[_BatchNorm, float | None] = {}  # while a step runs

    def set_depth(self, depth: int) -> None:
        """Freeze or unfreeze so that exactly the first ``depth`` layer modules are frozen, and tell the listeners.

        Raises:
            ValueError: ``depth`` is not in ``0 .. chain.max_depth``.
        """
        if not 0 <= depth <= self.chain.max_depth:
            raise ValueError(f"depth must be in 0..{self.chain.max_depth}, got {depth}")
        if depth == self.depth:
            return
        members = self._modules_of(depth)
        new = set(members) - set(self._members)
        settling = {module: steps for module, steps in self._settling.items() if module in members}
        for module in members:
            if module in new and isinstance(module, _BatchNorm) and module.training and follows_slowly(module):
                settling[module] = SETTLING_STEPS
        self._freeze(depth, settling)

    def _freeze(self, depth: int, settling: dict[_BatchNorm, int]) -> None:
        self._thaw()
        parameters = dict(self.module.named_parameters())
        for name in self.chain.prefix_parameters(depth):
            parameter = parameters[name]
            parameter.grad = None  # a gradient left behind would go on moving it through momentum and weight decay
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen_parameters.append(parameter)
        self.depth = depth
        self._members = self._modules_of(depth)
        self._settling = settling
        self._changed()

    def _modules_of(self, depth: int) -> list[nn.Module]:
        modules = dict(self.module.named_modules())
        return [modules[path] for path in self.chain.members(depth)]

    def _changed(self) -> None:
        self.settled_depth = self.depth
        while not self._settling.keys().isdisjoint(self._members[: len(self.chain.members(self.settled_depth))]):
            self.settled_depth -= 1
        self._hold_in_evaluation()
        self.version += 1
        for listener in self.listeners:
            listener.prefix_changed(self)

    def begin_batch(self) -> None:
        """A forward is about to run."""
        self.assert_modes()
        for module in self._settling:
            if module not in self._momentum_before:
                self._momentum_before[module], module.momentum = module.momentum, SETTLING_MOMENTUM

    def end_batch(self) -> None:
        """It is over. Safe to call twice."""
        for module, momentum in self._momentum_before.items():
            if module.momentum == SETTLING_MOMENTUM:  # or somebody else has set it
                module.momentum = momentum
        self._momentum_before = {}

    def count_step(self) -> bool:
        """An optimizer step was done; returns whether statistics have settled with it, for `settle`."""
        self._settling = {module: steps - 1 for module, steps in self._settling.items()}
        return any(steps <= 0 for steps in self._settling.values())

    def settle(self) -> None:
        """Hold statistics that have settled as they are, and tell the listeners."""
        self._settling = {module: steps for module, steps in self._settling.items() if steps > 0}
        self._changed()

    def state_dict(self) -> dict[str, Any]:
        """Plain types only, for a checkpoint."""
        paths = {module: path for path, module in self.module.named_modules()}
        return {"depth": self.depth, "settling": {paths[module]: steps for module, steps in self._settling.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` says, at ``chain.max_depth`` at most."""
        depth = min(state["depth"], self.chain.max_depth)
        if depth != self.depth:
            modules = dict(zip(self.chain.members(depth), self._modules_of(depth), strict=True))
            found = {modules[path]: int(steps) for path, steps in state["settling"].items() if path in modules}
            self._freeze(depth, {module: steps for module, steps in found.items() if isinstance(module, _BatchNorm)})

    def eval_all(self) -> None:
        """From here on, have all of the prefix in evaluation mode, so that it gives the same each time."""
        self._eval_all = True
        self._hold_in_evaluation()

    def _hold_in_evaluation(self) -> None:
        held = {module for module, _ in self._training_before}
        for module in self._members:
            if module in held or module in self._settling:
                continue
            if self._eval_all or any(b.is_floating_point() for b in module.buffers()):
                self._training_before.append((module, module.training))
                # ``self.train()`` may stand anywhere in the user's code, in the middle of a training step too.
                vars(module).setdefault("train", _StayInEvaluation(module))
        self.assert_modes()

    def assert_modes(self) -> None:
        """Put modules back into evaluation mode, if something that did not call ``train()`` took them out."""
        for module, _ in self._training_before:
            if module.training:  # which is read much faster than it is set
                module.training = False

    def learning_parameter(self) -> str | None:
        """Name of a frozen parameter that has a gradient, because something switched ``requires_grad`` on again."""
        if all(parameter.grad is None for parameter in self._frozen_parameters):
            return None
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return next(names[parameter] for parameter in self._frozen_parameters if parameter.grad is not None)

    def gradient_bytes(self, depth: int) -> int:
        """Size of the gradients of all parameters that learn when the first ``depth`` layer modules are frozen."""
        frozen = set(self._frozen_parameters)
        prefix = set(self.chain.prefix_parameters(depth))
        return sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in self.module.named_parameters()
            if (parameter.requires_grad or parameter in frozen) and name not in prefix
        )

    def drop_gradients(self) -> None:
        """Take away the gradients that frozen parameters were given, so that they stay as they are."""
        for parameter in self._frozen_parameters:
            parameter.grad = None

    def _thaw(self) -> None:
        for parameter in self._frozen_parameters:
            parameter.requires_grad_(True)
        self.end_batch()
        for module, training in self._training_before:
            if isinstance(vars(module).get("train"), _StayInEvaluation):
                del vars(module)["train"]
            module.training = training
        self._frozen_parameters, self._members, self._training_before, self._settling = [], [], [], {}

    def check_fits(self) -> None:
        """Compare the chain, as read from a checkpoint, with the model.

        Raises:
            CheckpointError: the chain names modules or parameters that the model lacks.
        """
        parameters = {name for name, _ in self.module.named_parameters()}
        modules = {path for path, _ in self.module.named_modules()}
        missing = [name for name in self.chain.prefix_parameters(len(self.chain)) if name not in parameters]
        missing += [
            path for m in self.chain.layer_modules for path in (m.boundary, *m.members, *m.units) if path not in modules
        ]
        missing += [path for path in self.chain.entries if path not in modules]
        if missing:
            raise CheckpointError(
                f"the checkpoint's layer chain does not fit {type(self.module).__name__}: it lacks {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            )


def follows_slowly(module: _BatchNorm) -> bool:
    """Whether its running statistics are those of many batches; with a momentum of 0 they are what they are."""
    momentum = module.momentum
    return module.running_mean is not None and (momentum is None or 0 < momentum < SETTLING_MOMENTUM)


class _StayInEvaluation:
    """Stands for the ``train`` of a frozen module. A copy of the module, pickled or not, has the one of its class."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        self._module.training = False
        for child in self._module.children():  # one that is not frozen may be among them
            child.train(mode)
        return self._module

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self._module).train, self._module)


def _describe(trace: StepTrace, graph: set[Node], boundaries: list[Boundary]) -> tuple[LayerModule, ...]:
    """Parameters and members of each layer module."""
    names = trace.parameter_names
    last_end: dict[str, int] = {}
    for root in trace.roots:
        if root.nodes_in(graph):
            for call in _subtree(root):
                last_end[call.path] = max(call.end, last_end.get(call.path, -1))
    visited: set[Node] = set()
    assigned: set[str] = set()
    described = []
    by_end = sorted(last_end.items(), key=lambda item: item[1])
    modules = dict(trace.module.named_modules())
    paths = {part: path for path, part in modules.items()}
    position = 0
    previous: ModuleCall | None = None
    for (name, boundary), last_use in zip(boundaries, last_uses(graph, boundaries), strict=True):
        new = walk(boundary.nodes_in(graph), visited)
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
                parameters=tuple(names[leaf] for leaf in trainable_leaves(new) if leaf in names),
                units=_units(trace, graph, previous, boundary),
                last_use=last_use,
            )
        )
        previous = boundary
    return tuple(described)


def _units(trace: StepTrace, graph: set[Node], previous: ModuleCall | None, boundary: ModuleCall) -> tuple[str, ...]:
    """The outermost calls on the way to the loss that lie between two boundaries, the later one included, by path."""
    around_previous = set()
    ancestor = previous
    while ancestor is not None:
        around_previous.add(ancestor)
        ancestor = ancestor.parent
    first = previous.end + 1 if previous is not None else 0
    between = {
        call for call in trace.calls[first : boundary.end + 1] if call not in around_previous and call.nodes_in(graph)
    }
    return tuple(
        dict.fromkeys(
            call.path
            for call in trace.calls[first : boundary.end + 1]
            if call in between and call.parent not in between
        )
    )


def _entry(call: ModuleCall) -> ModuleCall:
    while call.parent is not None:
        call = call.parent
    return call


def _subtree(call: ModuleCall) -> list[ModuleCall]:
    found = [call]
    for node in found:
        found.extend(node.children)
    return found
