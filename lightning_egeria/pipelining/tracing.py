"""The graph of a model: which of its modules reads whose output."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_egeria.errors import ArgumentError, UnsupportedError

Forward = Callable[[nn.Module, Any], Any]
"""Called with the model and a batch; returns the output of the model."""
_PREFIX = "model."


class _Root(nn.Module):
    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._call = model, forward

    def forward(self, batch: Any) -> Any:
        return self._call(self.model, batch)


class _Tracer(fx.Tracer):
    def __init__(self, units: Collection[str]) -> None:
        super().__init__()
        self._units = units

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a unit, or one of torch without a part in it."""
        own = module_qualified_name.removeprefix(_PREFIX)
        return own in self._units or (own not in ("", "model") and super().is_leaf_module(m, module_qualified_name))


class TracedModel:
    """The operations of a model's forward, of which calls of units are shared out among stages.

    Whatever lies between units, such as a concatenation, runs on each stage that reads it.

    Args:
        model: the model.
        forward: calls it with a batch.
        units: paths of the modules that are shared out.

    Attributes:
        nodes: the operations in order; the last one is the output.
        unit_of: path of the unit that each call belongs to.

    Raises:
        UnsupportedError: if `torch.fx` cannot trace the forward between units.
    """

    def __init__(self, model: nn.Module, forward: Forward, units: Sequence[str]) -> None:
        root = _Root(model, forward)
        try:
            self.nodes: list[fx.Node] = list(_Tracer({*units}).trace(root).nodes)
        except Exception as error:  # whatever the user's forward raises with proxies
            raise UnsupportedError(
                f"torch.fx cannot trace the model between the modules of stages: {type(error).__name__} {error}. Put "
                "whatever depends on values or shapes into a module, and name that in stages"
            ) from error
        self._modules = dict(root.named_modules())
        self._root = root
        self.unit_of = {
            node: node.target.removeprefix(_PREFIX)
            for node in self.nodes
            if node.op == "call_module" and isinstance(node.target, str) and node.target.removeprefix(_PREFIX) in units
        }
        self.random: set[fx.Node] = set()

    @property
    def output(self) -> fx.Node:
        """The output of the model."""
        return self.nodes[-1]

    def needed(self, wanted: Collection[fx.Node], held: Collection[str]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return what a stage computes and receives.

        Args:
            wanted: nodes whose values the stage must have.
            held: units of the stage.

        Returns:
            Nodes that it computes and calls of other units that it receives, both in order.
        """
        computed, received, queue = set[fx.Node](), set[fx.Node](), list(wanted)
        while queue:
            node = queue.pop()
            if node in computed or node in received:
                continue
            if node in self.unit_of and self.unit_of[node] not in held:
                received.add(node)
            else:
                computed.add(node)
                queue += node.all_input_nodes
        return [node for node in self.nodes if node in computed], [node for node in self.nodes if node in received]

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """Return the calls of units whose outputs a node reads, through whatever lies between."""
        computed, received = self.needed(node.all_input_nodes, ())
        assert not any(one in self.unit_of for one in computed), "no unit is held"
        return received

    def weights(self, node: fx.Node) -> list[nn.Parameter]:
        """Return the parameters that an operation reads."""
        if node.op == "call_module":
            return list(self._modules[str(node.target)].parameters())
        value = _attribute(self._root, str(node.target)) if node.op == "get_attr" else None
        return [value] if isinstance(value, nn.Parameter) else []

    def trains(self, node: fx.Node) -> bool:
        """Whether an operation reads a parameter that trains."""
        return any(parameter.requires_grad for parameter in self.weights(node))

    def evaluate(self, node: fx.Node, values: Mapping[fx.Node, Any], batch: Any) -> Any:
        """Return the value of a node, from the values of those it reads."""
        arguments: Any = fx.map_arg(node.args, values.__getitem__)
        named: Any = fx.map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            return batch
        if node.op == "get_attr":
            return _attribute(self._root, str(node.target))
        if node.op == "output":
            return arguments[0]
        if node.op == "call_method":
            return getattr(arguments[0], str(node.target))(*arguments[1:], **named)
        target: Any = self._modules[str(node.target)] if node.op == "call_module" else node.target
        return target(*arguments, **named)

    def find_random(self, batch: Any) -> Any:
        """Run the model once, note which operations draw random numbers, and refuse changes in place.

        Returns:
            The output of the model.

        Raises:
            UnsupportedError: if an operation changes its input in place.
        """
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            inputs = [leaf for one in node.all_input_nodes for leaf in tensors_of(values[one])]
            versions, before = [leaf._version for leaf in inputs], torch.get_rng_state()
            values[node] = self.evaluate(node, values, batch)
            if not torch.equal(before, torch.get_rng_state()):
                self.random.add(node)
            if versions != [leaf._version for leaf in inputs]:
                raise UnsupportedError(
                    f"operation {node.name!r} changes its input in place, which other stages read too. Let it return a "
                    "new tensor, or put it and what it changes into one module of a stage"
                )
        return values[self.output]


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw random numbers by a key in the body, and go on as before after it."""
    before = torch.get_rng_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def find_units(model: nn.Module, most: int) -> list[str]:
    """Return the paths of modules to share out: parts of containers, and of modules with more than ``most`` parameters.

    >>> find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), most=8)
    ['0', '2']
    """
    found: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        if not has_state(module):
            return
        container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        large = sum(parameter.numel() for parameter in module.parameters()) > most
        if not path or (not own and (container or large) and any(map(has_state, module.children()))):
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)
        elif path not in found:
            found.append(path)

    visit("", model)
    return found


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def check_stages(model: nn.Module, stages: Mapping[str, Sequence[str]]) -> None:
    """Check the modules of named stages.

    Raises:
        ArgumentError: if there is no such module, one is named twice or is part of another, or one is left out.
    """
    modules, paths = dict(model.named_modules()), [path for found in stages.values() for path in found]
    for path in paths:
        if not path or path not in modules:
            raise ArgumentError(f"stages: the model has no module {path!r}. Names are those of named_modules()")
        if paths.count(path) > 1 or any(path.startswith(other + ".") for other in paths):
            raise ArgumentError(f"stages: module {path!r} is named twice, or is part of another one")
    for path, module in modules.items():
        placed = any(f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.") or not path for other in paths)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not placed:
            raise ArgumentError(f"stages: module {path!r} has parameters or buffers and is in no stage. Add it to one")
