"""Tracing one training step: the modules that it called, in order, and the autograd graph that connects them.

The trace follows the user's step and runs nothing a second time. It replaces ``forward`` on each module instance
instead of using hooks, because a direct call of ``module.forward(x)`` and an earlier compiled graph skip hooks.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.core.network.forwards import Forward, ForwardReplacements
from lightning_egeria.core.network.sharding import is_sharded
from lightning_egeria.upstream.torch import base_of, is_cast


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of one module: its place in the call tree, and the autograd nodes of its output.

    Attributes:
        path: path of the module.
        module: the module.
        parent: the call that made this one; None if the training step did.
        children: the calls that this one made.
        outputs: ``grad_fn`` or None of each tensor of the output.
        sources: calls that it was given outputs of, or views of them. To follow them through functions, too, would need
            a mode of torch, which changes kernels, and so bits.
        makes_output: whether it returned another tensor than it was given, as a module in place does not.
        end: place in the order of completion.
    """

    path: str
    module: nn.Module
    parent: ModuleCall | None
    children: list[ModuleCall] = dataclasses.field(default_factory=list)
    outputs: tuple[Node | None, ...] = ()
    sources: set[ModuleCall] = dataclasses.field(default_factory=set)
    makes_output: bool = False
    end: int = -1

    @property
    def around(self) -> Iterator[ModuleCall]:
        """The calls that this one is part of, from the inside out."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    @property
    def root(self) -> ModuleCall:
        """The call by the training step that this one is part of, or is."""
        return [self, *self.around][-1]

    @property
    def nodes(self) -> list[Node]:
        """Autograd nodes of the output tensors that carry gradients."""
        return [node for node in self.outputs if node is not None]

    def nodes_in(self, graph: set[Node]) -> list[Node]:
        """Return the `nodes` that are part of ``graph``."""
        return [node for node in self.nodes if node in graph]


class StepTrace:
    """Records the module calls of one forward between `start` and `stop`.

    Attributes:
        calls: the calls, in the order of completion.
        parameters: the parameters by name, as in the optimizer.
        parameter_names: name of each parameter, and of those that FSDP2 replaces them by during a call.

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
        self._stacks = defaultdict[int, list[ModuleCall]](list)  # of each thread
        self._made: dict[int, tuple[weakref.ref[Tensor], ModuleCall]] = {}
        self._replacements = ForwardReplacements()

    @property
    def roots(self) -> list[ModuleCall]:
        """Calls by the training step itself, not by another module, in the order of completion."""
        return [call for call in self.calls if call.parent is None]

    def start(self) -> None:
        """Start observing every submodule."""
        for path, module in self.module.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._replacements.replace(module, functools.partial(self._observe, path, module))

    def stop(self) -> None:
        """Restore every module. Safe to call twice."""
        self._replacements.restore()

    def _observe(self, path: str, module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            stack = self._stacks[get_ident()]
            call = ModuleCall(path, module, stack[-1] if stack else None)
            call.sources = self._sources((args, kwargs))
            if is_sharded(module):
                for name, parameter in module.named_parameters(path):
                    self.parameter_names.setdefault(parameter, name)
            stack.append(call)
            try:
                output = original(*args, **kwargs)
            finally:
                stack.pop()
            call.outputs = tuple(leaf.grad_fn for leaf in tensor_leaves(output))
            given = {id(tensor) for leaf in tensor_leaves((args, kwargs)) for tensor in _with_base(leaf)}
            for leaf in tensor_leaves(output):
                call.makes_output = call.makes_output or id(leaf) not in given
                for tensor in _with_base(leaf):
                    if id(tensor) not in given:
                        self._made[id(tensor)] = weakref.ref(tensor), call
            call.end = len(self.calls)
            self.calls.append(call)
            if call.parent is not None:
                call.parent.children.append(call)
            return output

        return forward

    def _sources(self, given: Any) -> set[ModuleCall]:
        found: set[ModuleCall] = set()
        for leaf in tensor_leaves(given):
            for tensor in _with_base(leaf):
                reference, call = self._made.get(id(tensor), (None, None))
                if reference is not None and call is not None and reference() is tensor:
                    found.add(call)
                    break
        return found


def _with_base(tensor: Tensor) -> list[Tensor]:
    """The tensor, and the one that it is a view of."""
    base = base_of(tensor)
    return [tensor] if base is None else [tensor, base]


def walk(roots: Iterable[Node], visited: set[Node]) -> list[Node]:
    """Return the autograd nodes upstream of ``roots`` that are not in ``visited``, and add them to it.

    Calls with one ``visited`` for all boundaries visit each node of the graph only once.
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
    """Return the leaf tensor into which ``node`` accumulates a gradient, or None.

    Autocast makes one low-precision cast of a weight for all its uses in a step. The cast counts as the weight;
    otherwise a weight with two uses would seem to have one.
    """
    if is_cast(node):
        upstream = node.next_functions[0][0]
        node = upstream if upstream is not None else node
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None
