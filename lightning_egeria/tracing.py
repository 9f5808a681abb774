"""What one training step did: which modules it called, in which order, and what autograd connects them to.

The step itself is the user's own; nothing is run a second time. Modules are observed through a replaced ``forward`` on
the instance rather than through hooks, because code that calls ``module.forward(x)`` directly, and graphs that were
compiled before, never see a hook.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

Forward = Callable[..., Any]


class ForwardReplacements:
    """The ``forward`` methods that are replaced on module instances at this moment, and how to put them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Forward, Forward | None]] = []

    def replace(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        """Put ``wrap(module.forward)`` in the place of ``module.forward`` until `restore`."""
        before = vars(module).get("forward")
        original = module.forward
        replacement = functools.wraps(original)(wrap(original))
        vars(module)["forward"] = replacement
        self._replaced.append((module, replacement, before))

    def restore(self) -> None:
        """Put every original back. Safe to call twice."""
        while self._replaced:
            module, replacement, before = self._replaced.pop()
            if vars(module).get("forward") is not replacement:
                continue  # somebody replaced it after us; theirs wraps ours and is not ours to remove
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers weights of the module for each call: its own, and of others inside it."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def holds_shards(module: nn.Module) -> bool:
    """Whether FSDP2 has divided weights of the module or of one inside it."""
    return any(is_sharded(part) for part in module.modules())


def tensor_leaves(value: Any) -> Iterator[Tensor]:
    """Tensors inside nested mappings, sequences and dataclasses, in order.

    >>> [t.shape[0] for t in tensor_leaves({"a": torch.zeros(1), "b": (torch.zeros(2), "text", None)})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensor_leaves(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensor_leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensor_leaves(getattr(value, field.name))


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of one module: where it stands in the call tree and which autograd nodes made its output.

    ``outputs`` holds, per tensor leaf of the output, its ``grad_fn`` or None; ``end`` is the place in completion order.
    """

    path: str
    module: nn.Module
    parent: ModuleCall | None
    children: list[ModuleCall] = dataclasses.field(default_factory=list)
    outputs: tuple[Node | None, ...] = ()
    end: int = -1

    @property
    def nodes(self) -> list[Node]:
        """Autograd nodes of the output tensors that carry gradients."""
        return [node for node in self.outputs if node is not None]

    def nodes_in(self, graph: set[Node]) -> list[Node]:
        """Those of `nodes` that are part of ``graph``: on the way to the loss, say."""
        return [node for node in self.nodes if node in graph]


class StepTrace:
    """Records the module calls of one forward between `start` and `stop`.

    Attributes:
        calls: in completion order.
        parameters: the parameters by name, as the optimizer knows them.
        parameter_names: name of each parameter; also of those that FSDP2 puts in their place during a call.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> trace = StepTrace(net)
    >>> trace.start()
    >>> loss = net(torch.ones(5, 4)).sum()
    >>> trace.stop()
    >>> [call.path for call in trace.calls]
    ['0', '1', '2', '']
    >>> [call.path for call in trace.roots]
    ['']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[ModuleCall] = []
        self.parameters = dict(module.named_parameters())
        self.parameter_names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        self._stack: list[ModuleCall] = []
        self._replacements = ForwardReplacements()

    @property
    def roots(self) -> list[ModuleCall]:
        """Calls made by the training step itself, not from inside another module, in completion order."""
        return [call for call in self.calls if call.parent is None]

    def start(self) -> None:
        """Observe every submodule from here on."""
        for path, module in self.module.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._replacements.replace(module, functools.partial(self._observe, path, module))

    def stop(self) -> None:
        """Leave every module as it was. Safe to call twice."""
        self._replacements.restore()

    def _observe(self, path: str, module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = ModuleCall(path, module, self._stack[-1] if self._stack else None)
            if is_sharded(module):
                for name, parameter in module.named_parameters(path):
                    self.parameter_names.setdefault(parameter, name)
            self._stack.append(call)
            try:
                output = original(*args, **kwargs)
            finally:
                self._stack.pop()
            call.outputs = tuple(leaf.grad_fn for leaf in tensor_leaves(output))
            call.end = len(self.calls)
            self.calls.append(call)
            if call.parent is not None:
                call.parent.children.append(call)
            return output

        return forward


def walk(roots: Iterable[Node], visited: set[Node]) -> list[Node]:
    """Autograd nodes upstream of ``roots`` that are not in ``visited`` yet; adds them to it.

    Calling it boundary by boundary with one ``visited`` touches each node of the graph once, however long the chain.
    """
    found: list[Node] = []
    stack = [node for node in roots if node not in visited]
    visited.update(stack)
    while stack:
        node = stack.pop()
        found.append(node)
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in visited:
                visited.add(upstream)
                stack.append(upstream)
    return found


def leaf_of(node: Node) -> Tensor | None:
    """The leaf tensor that ``node`` accumulates a gradient into, or None.

    Autocast keeps one low-precision copy of a weight for all its uses in a step; that cast counts as the weight itself,
    or a weight that is used twice would look as if it were used once.
    """
    if node.name() == "ToCopyBackward0" and len(node.next_functions) == 1:
        upstream = node.next_functions[0][0]
        node = upstream if upstream is not None else node
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None
