"""The graph of a model: which of its modules reads whose output."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_egeria.core.snapshots.digests import bytes_of
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.attributes import Attributes
from lightning_egeria.methods.pipelining.seeding import generators
from lightning_egeria.methods.pipelining.units import modules_around

Forward = Callable[[nn.Module, Any], Any]
"""Called with the model and a batch; returns the output of the model."""
_PREFIX = "model."
_RECORDED = "recorded"


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a trace ends, for a forward that continues with any code behind its last call of a unit.

    Attributes:
        calls: paths of the units that the forward calls, in order.
        outputs: numbers of the calls whose outputs are the output of the trace.
    """

    calls: tuple[str, ...]
    outputs: tuple[int, ...]


class _Enough(Exception):  # noqa: N818 - ends a trace, and is no error
    pass


class _Root(nn.Module):
    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._call = model, forward

    def forward(self, batch: Any) -> Any:
        return self._call(self.model, batch)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, units: Collection[str], cut: Cut | None) -> None:
        super().__init__()
        self._units, self._cut = units, cut
        self.calls: list[fx.Proxy] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether no unit is inside of a module."""
        own = module_qualified_name.removeprefix(_PREFIX)
        if own in self._units:
            return True
        return own not in ("", "model") and not any(unit.startswith(own + ".") for unit in self._units)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note whether an operation is called under `torch.no_grad`, which no graph of torch.fx has."""
        node = super().create_node(*args, **kwargs)
        node.meta[_RECORDED] = torch.is_grad_enabled()
        return node

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stop behind the last call of a unit."""
        found = super().call_module(m, forward, args, kwargs)
        if self._cut is not None and self.path_of_module(m).removeprefix(_PREFIX) in self._units:
            self.calls.append(found)
            if len(self.calls) == len(self._cut.calls):
                raise _Enough
        return found


class TracedModel:
    """The operations of a model's forward, of which calls of units are shared out among stages.

    Whatever lies between units, such as a concatenation, runs on each stage that reads it.

    Args:
        model: the model.
        forward: calls it with a batch.
        units: paths of the modules that are shared out.
        cut: where the trace ends; None for the end of the forward.

    Attributes:
        nodes: the operations in order; the last one is the output.
        unit_of: path of the unit that each call belongs to.
        random: operations that may draw random numbers.
        in_place: operations that change what they read, which get copies.

    Raises:
        UnsupportedError: if `torch.fx` cannot trace the forward between units.
    """

    def __init__(self, model: nn.Module, forward: Forward, units: Sequence[str], cut: Cut | None = None) -> None:
        self._model, self._forward, self._units, self._cut = model, forward, tuple(units), cut
        self._root, self.nodes = self._traced()
        self._modules: dict[str, nn.Module] = dict(self._root.named_modules())
        self._constants = _texts(self._root, self.nodes)
        self.unit_of = {
            node: node.target.removeprefix(_PREFIX)
            for node in self.nodes
            if node.op == "call_module" and isinstance(node.target, str) and node.target.removeprefix(_PREFIX) in units
        }
        self.random: set[fx.Node] = set()
        self.in_place: set[fx.Node] = set()

    def _traced(self) -> tuple[_Root, list[fx.Node]]:
        root, tracer = _Root(self._model, self._forward), _Tracer({*self._units}, self._cut)
        before = [Attributes(module) for module in modules_around(self._model, self._units)]
        try:
            try:
                with torch.enable_grad():
                    graph = tracer.trace(root)
            except _Enough:
                assert self._cut is not None, "only a cut ends a trace"
                graph = tracer.graph
                graph.output(tuple(tracer.calls[number].node for number in self._cut.outputs))
        except Exception as error:  # whatever the user's forward raises with proxies
            raise UnsupportedError(
                f"torch.fx cannot trace the model between the modules of stages: {type(error).__name__} {error}. Move "
                "code that depends on values or shapes into a module, and name the module in stages"
            ) from error
        finally:
            changed = [name for attributes in before for name in attributes.restore()]
        if changed:
            raise UnsupportedError(
                f"code between the modules of stages changes the attribute {changed[0]!r}, which no process would see. "
                "Return it from forward, or change it in a module of a stage"
            )
        if self._cut is not None and [str(call.node.target)[len(_PREFIX) :] for call in tracer.calls] != [
            *self._cut.calls
        ]:
            raise UnsupportedError(
                "the modules of stages are called in another order than at first, or one is left out. Call all of them "
                "for every batch"
            )
        return root, list(graph.nodes)

    def refresh(self) -> str:
        """Trace again, and take over whatever numbers changed between units, such as a weight that is annealed.

        Returns:
            A text of all operations, the same on all processes that compute the same.

        Raises:
            UnsupportedError: if other operations are called, or in another order.
        """
        root, nodes = self._traced()
        if list(map(_kind, nodes)) != list(map(_kind, self.nodes)):
            raise UnsupportedError(
                "the code between the modules of stages calls other operations than before. Move the code that "
                "changes them into a module, and name the module in stages"
            )
        texts, old = _texts(root, nodes), {new.name: node for new, node in zip(nodes, self.nodes, strict=True)}
        for text, before, node, new in zip(texts, self._constants, self.nodes, nodes, strict=True):
            if text != before:
                node.args = fx.map_arg(new.args, lambda other: old[other.name])
                node.kwargs = fx.map_arg(new.kwargs, lambda other: old[other.name])
                self.random.add(node)  # which it may be now
        self._root, self._constants = root, texts
        return "\n".join(texts)

    def expect_random_anywhere(self) -> None:
        """Treat every operation as one that may draw random numbers, such as after a change between train and eval."""
        self.random.update(self.nodes)

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

    def module(self, node: fx.Node) -> nn.Module:
        """Return the module that an operation calls."""
        return self._modules[str(node.target)]

    @property
    def rest(self) -> list[nn.Parameter]:
        """The parameters outside of units."""
        inside = {id(weight) for node in self.unit_of for weight in self.weights(node)}
        return [parameter for parameter in self._model.parameters() if id(parameter) not in inside]

    def is_recorded(self, node: fx.Node) -> bool:
        """Whether autograd records an operation: it is not called under `torch.no_grad`."""
        return bool(node.meta.get(_RECORDED, True))

    def trains(self, node: fx.Node) -> bool:
        """Whether an operation reads a parameter that trains."""
        return any(parameter.requires_grad for parameter in self.weights(node))

    def evaluate(self, node: fx.Node, values: Mapping[fx.Node, Any], batch: Any) -> Any:
        """Return the value of a node, from the values of those it reads, which stay as they are."""
        with contextlib.nullcontext() if self.is_recorded(node) else torch.no_grad():
            if node in self.in_place:
                values = {one: _copied(values[one]) for one in node.all_input_nodes}
            return self._evaluated(node, values, batch)

    def _evaluated(self, node: fx.Node, values: Mapping[fx.Node, Any], batch: Any) -> Any:
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
        """Run the model once, and note which operations draw random numbers or change what they read.

        Returns:
            The output of the model.

        Raises:
            UnsupportedError: if an operation changes in place what is read again.
        """
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            inputs = [leaf for one in node.all_input_nodes for leaf in tensors_of(values[one])]
            versions, before = [leaf._version for leaf in inputs], [one.get_state() for one in generators()]
            values[node] = self.evaluate(node, values, batch)
            if not all(map(torch.equal, before, [one.get_state() for one in generators()])):
                self.random.add(node)
            changed = [leaf for leaf, version in zip(inputs, versions, strict=True) if leaf._version != version]
            if changed:
                self._check_read_once(node, changed, values)
                self.in_place.add(node)
        return values[self.output]

    def _check_read_once(self, node: fx.Node, changed: Sequence[Tensor], values: Mapping[fx.Node, Any]) -> None:
        """Refuse a change in place whose tensors others read: weights, the batch, or operations that come later."""
        memory, later = _memory_of(changed), set(self.nodes[self.nodes.index(node) + 1 :])
        lasting = [one for one in values if one.op in ("placeholder", "get_attr")]
        again = [one for one in values if one is not node and not later.isdisjoint(one.users)]
        held = [*self._root.parameters(), *self._root.buffers()]
        if memory & _memory_of([*held, *tensors_of([values[one] for one in (*lasting, *again)])]):
            raise UnsupportedError(
                f"operation {node.name!r} changes its input in place, which is read again. Let it return a new tensor, "
                "or put it and what it changes into one module of a stage"
            )


def _copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, torch.clone, value)


def _memory_of(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(type(target)))


def _kind(node: fx.Node) -> tuple[Any, ...]:
    inputs = [other.name for other in node.all_input_nodes]
    return node.op, _name(node.target), inputs, node.meta.get(_RECORDED)


def _texts(root: nn.Module, nodes: Sequence[fx.Node]) -> list[str]:
    """Return each operation with its constants as a text that has no addresses."""

    def plain(value: Any) -> Any:
        return _name(value) if callable(value) else value

    texts = []
    for node in nodes:
        text = f"{node.name} {node.op} {_name(node.target)}"
        text += f" {fx.node.map_aggregate(node.args, plain)} {fx.node.map_aggregate(node.kwargs, plain)}"
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            text += f" {bytes_of(_attribute(root, str(node.target))).hex()}"
        texts.append(text)
    return texts


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
