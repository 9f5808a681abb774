"""The gate in front of frozen layer modules: nothing that trains lies before it, and no gradient passes it.

A frozen prefix costs no backward only if its inputs require no gradient. They may all the same: PEFT lets the output of
the embeddings require one, so that checkpointing works, and a layer that the first step left out at random may train
in front of layers that are frozen. The gate looks at the inputs of the frozen modules while a step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_egeria.core.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.tracing import leaf_of, walk
from lightning_egeria.upstream.torch import needs_gradient


class FrontGate:
    """Looks at what frozen modules are called with, and cuts it from autograd.

    An input that requires a gradient without any parameter behind it is detached, unless the program itself gave the
    network something that requires one: it may want that gradient.

    Parameters that took no part in the traced step may do so later: a layer that is left out at random, a branch, a
    mask. If one of them is behind the input of a frozen module, it trains in front of it.

    It uses hooks, which stay until the backward is over, because checkpointing may run a part of the front again. They
    are there only in steps that need them: the first one after a change of the prefix, those in which there is
    something to cut, and those in which an absent module is called.

    Args:
        module: the model.
        chain: its layer chain.

    Attributes:
        absent: parameters that took no part in any step so far that was looked at, by name.
        found: names of those that trained in front of frozen layer modules in this step, with the index of the first
            of these.
        is_open: whether the frozen modules of this step were looked at.
        cuts: whether something was detached since the prefix changed.
        given: path of the module that the program called with something that requires a gradient, which reached frozen
            layer modules; None if there is none.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x.clone().requires_grad_())
    >>> net = Net(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> gate = FrontGate(net, LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum()))
    >>> _ = net[0].requires_grad_(False)
    >>> seen = []
    >>> handle = net[1].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    >>> _ = net(torch.ones(5, 4))
    >>> gate.start(depth=1)
    >>> _ = net(torch.ones(5, 4))
    >>> gate.stop()
    >>> seen, gate.cuts, gate.given
    ([True, False], True, None)
    """

    def __init__(self, module: nn.Module, chain: LayerChain) -> None:
        parameters = dict(module.named_parameters())
        self.absent = {name: parameters[name] for name in chain.absent if name in parameters}
        self.found: dict[str, int] = {}
        self.cuts = False
        self.given: str | None = None
        self._module = module
        self._chain = chain
        self._depth = 0
        self.is_open = False
        self._is_checked = False
        self._suspects: set[str] = set()  # absent parameters that took part in a step that was not looked at
        self._called: set[str] = set()  # absent modules, in this step
        self._bypassed: set[str] = set()  # modules that were called without their absent parameters
        self._from_program: dict[Tensor, str] = {}  # leaves behind what the program gave to the network
        self._watching: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []

    def start(self, depth: int) -> None:
        """Look at a step with the first ``depth`` layer modules frozen."""
        self.stop()
        self._depth = depth
        if not depth:
            return
        if not self._is_checked or self.cuts or self._suspects:
            self._open()
            return
        owners = {name.rpartition(".")[0] for name in self.absent} - self._bypassed
        for path in owners:
            owner = self._module.get_submodule(path)
            self._watching.append(owner.register_forward_pre_hook(functools.partial(self._appeared, path)))

    def stop(self) -> None:
        """Look at nothing any more. Safe to call twice."""
        for handle in (*self._handles, *self._watching):
            handle.remove()
        self._handles, self._watching, self._from_program = [], [], {}

    @property
    def is_checked(self) -> bool:
        """Whether a step was looked at since the prefix changed."""
        return self._is_checked

    @property
    def asks_others(self) -> bool:
        """Whether several processes must compare what they found in this step; the same in all of them.

        Their gradients are the same, so they know which absent parameters took part anywhere.
        """
        return bool(self.absent) and (
            not self._is_checked or any(parameter.grad is not None for parameter in self.absent.values())
        )

    def step_over(self, was_open: bool) -> None:
        """The optimizer has stepped; gradients of the step are still there.

        Args:
            was_open: `is_open`, in all processes.
        """
        part = {name for name, parameter in self.absent.items() if parameter.grad is not None}
        for name in part if was_open else ():
            del self.absent[name]  # it trains behind the prefix
        self._suspects = (self._suspects | part) & self.absent.keys()
        self._bypassed |= self._called - {name.rpartition(".")[0] for name in part}
        self._called, self.found, self.is_open, self._is_checked = set(), {}, False, True

    def _open(self) -> None:
        if self._handles:
            return
        self.is_open = True
        modules = dict(self._module.named_modules())
        for path in self._chain.entries:
            self._hook(modules[path], functools.partial(self._entered, path))
        for index, layer_module in enumerate(self._chain.layer_modules[: self._depth]):
            for path in layer_module.units:
                own = list(modules[path].parameters())
                # Others may run behind the prefix too, such as one activation for all layers.
                if own and not any(parameter.requires_grad for parameter in own):
                    self._hook(modules[path], functools.partial(self._reached, index))

    def _hook(self, module: nn.Module, hook: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _appeared(self, path: str, module: nn.Module, args: Any) -> None:
        self._called.add(path)
        self._open()

    def _entered(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in _leaves_behind(_with_gradient((args, kwargs))):
            if not isinstance(leaf, nn.Parameter):
                self._from_program[leaf] = path

    def _reached(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = _with_gradient((args, kwargs)) if torch.is_grad_enabled() else []
        leaves = _leaves_behind(given)
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            for name, parameter in self.absent.items():
                if any(parameter is leaf for leaf in leaves):
                    self.found.setdefault(name, index)
            return None
        from_program = [self._from_program[leaf] for leaf in leaves if leaf in self._from_program]
        if not given or from_program:
            self.given = self.given if not from_program else from_program[0]
            return None
        self.cuts = True
        kept: tuple[tuple[Any, ...], dict[str, Any]] = change_leaves((args, kwargs), Tensor, _cut)
        return kept


def _with_gradient(given: Any) -> list[Tensor]:
    return [leaf for leaf in tensor_leaves(given) if needs_gradient(leaf)]


def _leaves_behind(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that tensors follow from."""
    found = [tensor for tensor in tensors if tensor.grad_fn is None]
    nodes = walk([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None], set())
    return list(dict.fromkeys([*found, *(leaf for node in nodes if (leaf := leaf_of(node)) is not None)]))


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach() if needs_gradient(tensor) else tensor
