"""Lazy tensors: tensors that stand for data that was not loaded or computed.

Whatever needs the values of a lazy tensor loads or computes them first, so a program that trains with lazy tensors
computes what it computes with ordinary ones. An operation that needs only shapes is recorded instead, and its result is
lazy too.

A lazy tensor has a shape, strides, a dtype and a device, but no memory. Its values can be asked for in four ways:

1.  ``__torch_function__`` sees each call of torch's Python functions and methods. Those that hand out values or memory
    without an operation (`_reads`, `_memory`: ``item``, ``numpy``, ``data_ptr``) get the computed tensor. Where memory
    was handed out, the caller may write to it, so the tape no longer trusts what it has recorded (`Tape.change`).
2.  Where autograd records an operation, all its arguments become ordinary tensors first (`_learns`): the kernels, and
    what autograd saves, are those of a step without the cache.
3.  ``__torch_dispatch__`` sees each operation that is left. `_kind` decides from its schema and tags whether it is
    recorded, reads shapes only, changes an argument, or runs now on computed values.
4.  What passes by both is overridden one by one: ``repr``, pickling, deep copies and ``as_subclass``. An operation of
    C++ that reads memory it was not given fails in torch ("data is not allocated") and runs again on ordinary tensors.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_egeria.caching.record.meta import Meta, is_small, stacked
from lightning_egeria.caching.record.tape import UNKNOWN, Node, Tape

_HERE = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))
# Their kernels without values have other strides or results, or torch takes other ones for a subclass.
_OTHER_KERNELS = ("linalg", "fft", "svd", "eig", "unpool", "rnn", "lstm", "gru")
_NORMS = (torch.norm, Tensor.norm)  # the nuclear one uses svd
# They ask for a tensor itself.
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
# Operations that read only the shape, dtype and device of their first argument.
_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


class _Kind(enum.Enum):
    """What an operation does with a lazy argument."""

    PURE = enum.auto()  # it can be recorded
    FACTORY = enum.auto()  # it reads only the shape
    WRITES = enum.auto()  # it changes an argument
    WRITES_AT_RANDOM = enum.auto()
    RESHAPES = enum.auto()  # it changes the shape of an argument in place
    READS = enum.auto()  # it needs the values now


@functools.cache
def _kind(func: Any) -> _Kind:
    name = func._schema.name.split("::")[1]
    if func.namespace == "aten" and (name in _FACTORIES or name.startswith("new_")):
        return _Kind.FACTORY
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    # Batch normalisation changes its running statistics, and its schema does not say so.
    pure = func.namespace == "aten" and tags.isdisjoint(func.tags) and "batch_norm" not in name
    if torch.Tag.inplace_view in func.tags or name in ("resize_", "set_"):
        return _Kind.RESHAPES
    if any(word in name for word in _OTHER_KERNELS):
        pure = False
    if func._schema.is_mutable:
        return _Kind.WRITES if pure else _Kind.WRITES_AT_RANDOM
    returns = [str(one.type) for one in func._schema.returns]
    tensors = bool(returns) and all(one in ("Tensor", "List[Tensor]") for one in returns)
    return _Kind.PURE if pure and tensors else _Kind.READS


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation changes."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += pytree.tree_leaves(kwargs[argument.name] if argument.name in kwargs else args[at : at + 1])
    return found


def _record(func: Any, flat: list[Any], spec: pytree.TreeSpec, lazies: list[LazyTensor]) -> Any:
    """Record an operation and return its lazy results; None if it has to run now."""
    recorded = _nodes_of(func, flat, spec, lazies, ())
    if recorded is None:
        return None
    nodes, form = recorded
    if _is_view(func):
        for node in nodes:
            node.base = lazies[0].node
    return pytree.tree_unflatten([show(node) for node in nodes], form)


def _record_write(
    func: Any, flat: list[Any], spec: pytree.TreeSpec, lazies: list[LazyTensor], written: list[LazyTensor]
) -> bool:
    """Record a change in place, and return whether it was recorded.

    It is not if another lazy tensor shares the memory, or the dataset may, which a sample itself can be a part of.
    """
    tape = written[0].node.tape
    if len(written) != 1 or tape.is_shared(written[0]) or written[0].node.root.row is not None:
        return False
    places = tuple(place for place, leaf in enumerate(flat) if leaf is written[0])
    recorded = _nodes_of(func, flat, spec, lazies, places)
    if recorded is None or len(places) != 1:
        return False
    written[0].node = recorded[0][-1]
    tape.shows(written[0], written[0].node)
    return True


def _reshape(func: Any, lazy: LazyTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyTensor:
    """Change the shape of a lazy tensor in place; it stands for a known value from then on."""
    lazy.node.tape.change()
    value = lazy.node.ask().detach()
    rest, options = pytree.tree_map_only(LazyTensor, plain, (args, kwargs))
    func(value, *rest, **options)
    lazy.node = Node(lazy.node.tape, Meta.of(value), UNKNOWN, value=value)
    with torch._C.DisableTorchFunctionSubclass():
        lazy.data = LazyTensor(lazy.node)  # takes over its shape
    return lazy


def _nodes_of(
    func: Any, flat: list[Any], spec: pytree.TreeSpec, lazies: list[LazyTensor], written: tuple[int, ...]
) -> tuple[tuple[Node, ...], pytree.TreeSpec] | None:
    tape = lazies[0].node.tape
    if tape.is_over:
        return None
    for leaf in flat:
        if isinstance(leaf, LazyTensor):
            needs_gradient = leaf.requires_grad and func is not torch.ops.aten.detach.default
            if leaf.node.tape is not tape or leaf.node.name == UNKNOWN or needs_gradient:
                return None
        elif isinstance(leaf, Tensor):
            known = type(leaf) in (Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and is_small(leaf)
            if leaf.requires_grad or not known:  # its value of that moment would be lost
                return None
    try:
        found = _shapes(func, spec, *[_known_of(leaf) for leaf in flat])
    except TypeError:  # an argument cannot be hashed
        return None
    if found is None:
        return None
    metas = [*found[0], *(Meta.of(flat[place]) for place in written)]
    nodes = tape.record(str(func), func, [node_of(tape, leaf) for leaf in flat], spec, metas, written)
    return None if nodes is None else (nodes, found[1])


@functools.cache
def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None for one in func._schema.returns)


def _known_of(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return leaf.node.meta
    return Meta.of(leaf) if isinstance(leaf, Tensor) else leaf


@functools.lru_cache(maxsize=4096, typed=True)
def _shapes(func: Any, spec: pytree.TreeSpec, *flat: Any) -> tuple[list[Meta], pytree.TreeSpec] | None:
    """What the results of an operation look like, and their structure; None if only running it can tell."""
    metas = [leaf for leaf in flat if isinstance(leaf, Meta)]
    device = next((meta.device for meta in metas if meta.device.type != "cpu"), metas[0].device)
    asked = [leaf for leaf in flat if isinstance(leaf, torch.device)]
    empty = [leaf.empty("meta") if isinstance(leaf, Meta) else leaf for leaf in flat]
    args, kwargs = pytree.tree_unflatten(empty, spec)
    if asked:
        kwargs["device"] = torch.device("meta")
    try:
        leaves, form = pytree.tree_flatten(func(*args, **kwargs))
    except (NotImplementedError, RuntimeError):  # it cannot run without values, or fails: the real one tells how
        return None
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return [Meta(tuple(leaf.shape), leaf.stride(), leaf.dtype, (asked or [device])[0]) for leaf in leaves], form


@functools.cache
def _reads() -> frozenset[Any]:
    """Methods that need the values and do not say so to ``__torch_dispatch__``."""
    numbers = "__float__ __int__ __index__ __bool__ __complex__ item"  # as `torch.tensor` asks of the items of a list
    others = "tolist map_ apply_ map2_ type new _is_view __reduce_ex__ __format__ is_shared storage_offset"
    return _memory() | _methods(f"{numbers} {others}")


@functools.cache
def _memory() -> frozenset[Any]:
    """Methods that hand out the memory of a tensor, or replace it."""
    found = _methods("numpy data_ptr __array__ storage untyped_storage _typed_storage __dlpack__ share_memory_ set_")
    return found | {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]  # a descriptor


def _methods(names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name))


class LazyTensor(Tensor):
    """Stands for a tensor that was not loaded or computed yet.

    Attributes:
        node: what it stands for.
    """

    __module__, __qualname__ = "torch", "Tensor"  # for code that goes by the name of a type, as loggers of images do
    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> LazyTensor:  # noqa: D102  # the class says it
        meta = node.meta
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device
        )
        lazy.node = node
        return lazy

    def __init__(self, node: Node) -> None:
        pass

    @property
    def is_known(self) -> bool:
        """Whether the values are there already."""
        return self.node.value is not None

    @property
    def attributes(self) -> dict[str, Any]:
        """What the program has set on the tensor."""
        return {name: value for name, value in vars(self).items() if name != "node"}

    def __getattr__(self, name: str) -> Any:
        """Return what the dataset has set on a tensor of a sample."""
        if name.startswith("_") or name == "node" or self.node.row is None:
            raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name, obj=self)
        return getattr(plain(self), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what leaves torch; all else goes to `__torch_dispatch__`."""
        nuclear = func in _NORMS and "nuc" in [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, str)]
        if nuclear or func in _reads() or any(word in getattr(func, "__name__", "") for word in _OTHER_KERNELS):
            for lazy in pytree.tree_leaves(args) if func in _memory() else ():  # the caller may write to it
                if isinstance(lazy, LazyTensor):
                    lazy.node.tape.change()
        elif func in _AUTOGRAD or not _learns(args, kwargs):
            if func is Tensor.new_tensor:  # it reads the items of a list past torch
                args = (args[0], *pytree.tree_map_only(LazyTensor, plain, args[1:]))
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                # Many operations are made of others, and read a value past them, such as lengths or places.
                if "data is not allocated" not in str(error):
                    raise
        # Where autograd records, it must see the tensors themselves, for the kernels and saved tensors of a plain step.
        args, kwargs = pytree.tree_map_only(LazyTensor, plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is not annotated alike
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operation, or compute its arguments and run it."""
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        lazies = [leaf for leaf in flat if isinstance(leaf, LazyTensor)]
        kind = _kind(func)
        if kind is _Kind.PURE:
            recorded = _record(func, flat, spec, lazies)
            if recorded is not None:
                return recorded
        elif kind is _Kind.FACTORY:
            empty = [leaf.node.meta.empty() if isinstance(leaf, LazyTensor) else leaf for leaf in flat]
            args, kwargs = pytree.tree_unflatten(empty, spec)
            return func(*args, **kwargs)
        elif kind in (_Kind.WRITES, _Kind.WRITES_AT_RANDOM):
            written = [leaf for leaf in _written(func, args, kwargs or {}) if isinstance(leaf, LazyTensor)]
            if written and kind is _Kind.WRITES and _record_write(func, flat, spec, lazies, written):
                return written[0]
            for tape in {id(lazy.node.tape): lazy.node.tape for lazy in written}.values():
                tape.change()
        elif kind is _Kind.RESHAPES and isinstance(args[0], LazyTensor):
            return _reshape(func, args[0], args[1:], kwargs or {})
        owners = {id(lazy.node.ask()): lazy for lazy in lazies}
        values = [leaf.node.ask() if isinstance(leaf, LazyTensor) else leaf for leaf in flat]
        args, kwargs = pytree.tree_unflatten(values, spec)
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda leaf: owners.get(id(leaf), leaf), result)

    def as_subclass(self, cls: type[Any]) -> Any:  # noqa: D102  # torch's own asks no ``__torch_function__``
        self.node.tape.change()  # it shares the memory
        return plain(self).as_subclass(cls)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch passes tensor_contents
        return repr(plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).clone()


def _learns(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether autograd records an operation: one of its tensors needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    flat = [*args, *kwargs.values()] if kwargs else args
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [
            one
            for leaf in flat
            for one in (leaf if isinstance(leaf, list | tuple) else (leaf,))
            if isinstance(one, Tensor) and one.requires_grad
        ]
    return bool(tensors) and not any(isinstance(one, LazyTensor) for one in tensors)


def show(node: Node) -> LazyTensor:
    """Return a lazy tensor for a node."""
    lazy = LazyTensor(node)
    node.tape.shows(lazy, node)
    return lazy


def stack(nodes: list[Node]) -> Tensor:
    """Return what `torch.stack` makes of the lazy tensors of nodes, and make none if the nodes are alike."""
    first = nodes[0]
    if not first.tape.is_over and all(node.meta == first.meta for node in nodes):
        flat, spec = pytree.tree_flatten(((nodes,), {}))
        func = torch.ops.aten.stack.default
        recorded = first.tape.record(str(func), func, flat, spec, [stacked(first.meta, len(nodes))])
        if recorded is not None:
            return show(recorded[0])
    return torch.stack([show(node) for node in nodes])


def node_of(tape: Tape, leaf: Any) -> Any:
    """Return the node of a tensor, and any other argument as it is."""
    if isinstance(leaf, LazyTensor):
        return leaf.node
    return tape.outside(leaf) if isinstance(leaf, Tensor) else leaf


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the values of a lazy one."""
    return tensor.node.ask() if isinstance(tensor, LazyTensor) else tensor


def caller(folder: str) -> str:
    """Return the function, file and line that asks for values: outside of torch, this package and another folder."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_HERE, folder)):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
