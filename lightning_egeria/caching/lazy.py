"""Lazy tensors: tensors that stand for data that was not loaded or computed.

Whatever needs the values of a lazy tensor loads or computes them first, so a program that trains with lazy tensors
computes what it computes with ordinary ones. An operation that needs only shapes is recorded on a `Tape` instead, and
its result is lazy too. The key of a node names the whole computation behind it: two nodes with equal keys are the same
function of the same rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_egeria.errors import CacheError

SNAPSHOT_BYTES = 2**20  # larger tensors are not copied when an operation on them is recorded
UNKNOWN = -1  # key of a value that something outside the tape has made or changed
# Operations that read only the shape, dtype and device of their first argument.
_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
# Operations whose list of sizes begins with the batch size.
_SIZED = (["view"], ["_unsafe_view"], ["reshape"], ["expand"])


class Meta(NamedTuple):
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return the shape, strides, dtype and device of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor like this one, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


class Keys:
    """Numbers for computations: equal numbers, equal computations.

    >>> keys = Keys()
    >>> first, second = keys.number(("row", 0)), keys.number(("row", 1))
    >>> keys.number(("row", 0)) == first, first == second
    (True, False)
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._parts: list[tuple[Any, ...]] = []

    def number(self, parts: tuple[Any, ...]) -> int:
        """Return the number of a computation. The keys among its parts come wrapped in `Of`."""
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = len(self._parts)
            self._parts.append(parts)
        return number

    def describe(self, number: int) -> str:
        """Return the computation in words, the same in each process; long."""
        lines: dict[int, str] = {}
        for at in self._behind(number):
            words = [f"%{list(lines).index(p.key)}" if isinstance(p, Of) else repr(p) for p in self._parts[at]]
            lines[at] = " ".join(words)
        return "\n".join(lines.values())

    def _behind(self, number: int) -> list[int]:
        found: set[int] = set()
        waiting = [number]
        while waiting:
            at = waiting.pop()
            if at not in found:
                found.add(at)
                waiting += [part.key for part in self._parts[at] if isinstance(part, Of)]
        return sorted(found)


class Of(NamedTuple):
    """The key of an argument, among the parts of a key."""

    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A recorded operation.

    Attributes:
        run: the operation; takes the arguments, returns a tensor or a tree with tensors.
        flat: leaves of the arguments, with nodes for tensors.
        spec: their structure.
        written: places, among ``flat``, of the nodes that the operation changes in place. It gets copies, and these
            are results of the call too, behind the others.
    """

    run: Callable[..., Any]
    flat: tuple[Any, ...]
    spec: pytree.TreeSpec
    written: tuple[int, ...] = ()

    def __call__(self, values: Mapping[Node, Tensor]) -> list[Tensor]:
        """Run it with these values for its nodes; return all its results."""
        flat = [values[leaf] if isinstance(leaf, Node) else leaf for leaf in self.flat]
        for place in self.written:
            flat[place] = flat[place].clone()
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        with torch.no_grad() if not isinstance(self.run, Unit) else contextlib.nullcontext():
            leaves = pytree.tree_leaves(self.run(*args, **kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [flat[place] for place in self.written]


class Unit:
    """Base of recorded operations that run frozen layers."""


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """One value of a tape: a row of a sample, a tensor from outside, or the result of a recorded operation.

    Attributes:
        tape: the tape that it belongs to.
        meta: shape, strides, dtype and device.
        key: number of the computation; `UNKNOWN` if something outside the tape made the value.
        call: operation that computes it; None for a leaf.
        siblings: nodes of all results of the operation, in order.
        row: position of the sample in the batch and number of the tensor in the sample; None for others.
        value: the tensor, once it is known.
        version: version counter of a leaf from outside, when it was recorded.
        number: place in the order in which the nodes of the tape were made.
        base: node whose memory it shares, for the result of a view; else the node itself.
        shown: the lazy tensor, while the program holds it.
    """

    tape: Tape
    meta: Meta
    key: int
    call: Call | None = None
    siblings: tuple[Node, ...] = ()
    row: tuple[int, int] | None = None
    value: Tensor | None = None
    version: int = 0
    number: int = 0
    base: Node | None = None
    shown: weakref.ref[Tensor] | None = None

    @property
    def is_unit(self) -> bool:
        """Whether it is the output of frozen layers."""
        return self.call is not None and isinstance(self.call.run, Unit)

    @property
    def root(self) -> Node:
        """Node that owns the memory."""
        return self if self.base is None else self.base.root

    def arguments(self) -> Iterator[Node]:
        """Yield the nodes that the operation reads."""
        return (leaf for leaf in self.call.flat if isinstance(leaf, Node)) if self.call is not None else iter(())

    def before(self, known: Callable[[Node], bool]) -> list[Node]:
        """Return this node and all nodes behind it that are not ``known``, in the order in which they were made."""
        found: dict[int, Node] = {}
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.number not in found and not known(node):
                found[node.number] = node
                waiting.extend(node.arguments())
        return [found[number] for number in sorted(found)]

    def leaves(self) -> list[Node]:
        """Return the leaves that the value is computed from."""
        return [node for node in self.before(lambda _: False) if node.call is None]

    def compute(self) -> Tensor:
        """Return the value; load and compute whatever it needs."""
        if self.value is None:
            order = self.before(lambda node: node.value is not None)
            self.tape.load(node for node in order if node.row is not None)
            for node in order:
                if node.value is None and node.call is not None:
                    node.call_now()
            for node in order:
                if node is not self and node.call is not None and (node.shown is None or node.shown() is None):
                    node.value = None  # computed again if it is wanted once more
        if self.value is None:
            raise CacheError("a lazy tensor could not be computed")
        return self.value

    def call_now(self) -> None:
        """Run the operation; its arguments must have values."""
        if self.call is None:
            raise CacheError("a leaf has no operation")
        values: dict[Node, Tensor] = {}
        for node in self.arguments():
            if node.value is None:
                raise CacheError("an argument of a recorded operation has no value")
            if node.row is None and node.call is None and node.version != version_of(node.value):
                raise CacheError(
                    f"a tensor of shape {tuple(node.meta.shape)} changed in place after the frozen layers were called "
                    "with it, and their output was asked for later. Leave out FrozenPrefixCache"
                )
            values[node] = node.value
        for sibling, value in zip(self.siblings, self.call(values), strict=True):
            if sibling.value is None:
                sibling.value = value


class Tape:
    """The recorded operations on the tensors of one batch.

    Args:
        keys: numbers of computations, shared by all batches.
        size: samples of the batch.
        load_rows: returns the tensors of samples: takes pairs of a position and a tensor's number.
        touched: called when the values of rows are needed, before they are loaded.
        owner: the batch, for those who know a tensor of it only.
    """

    def __init__(
        self,
        keys: Keys,
        size: int,
        load_rows: Callable[[list[tuple[int, int]]], list[Tensor]],
        touched: Callable[[], None],
        owner: Any = None,
    ) -> None:
        self.owner = owner
        self.keys = keys
        self.size = size
        self._load_rows = load_rows
        self._touched = touched
        self._count = itertools.count()
        self._shown: list[weakref.ref[Tensor]] = []
        self._outside: dict[int, tuple[weakref.ref[Tensor], int, Node]] = {}

    def row(self, position: int, number: int, meta: Meta, value: Tensor | None = None) -> Node:
        """Return the node of tensor ``number`` of the sample at ``position``."""
        key = self.keys.number(("row", number, position))
        return Node(self, meta, key, row=(position, number), value=value, number=next(self._count))

    def node_of(self, leaf: Any) -> Any:
        """Return the node of a tensor, and any other argument as it is."""
        if isinstance(leaf, LazyTensor):
            return leaf.node
        return self.outside(leaf) if isinstance(leaf, Tensor) else leaf

    def is_shared(self, lazy: LazyTensor) -> bool:
        """Whether another lazy tensor that the program holds shares the memory of this one."""
        others = (reference() for reference in self._shown)
        return any(isinstance(o, LazyTensor) and o is not lazy and o.node.root is lazy.node.root for o in others)

    def outside(self, tensor: Tensor) -> Node:
        """Return the node of a tensor that is not lazy. A small one is copied, in case it changes in place later."""
        found = self._outside.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] == version_of(tensor):
            return found[2]
        small = tensor.numel() * tensor.element_size() <= SNAPSHOT_BYTES and not isinstance(tensor, torch.nn.Parameter)
        value = tensor.clone() if small else tensor
        key = self.keys.number(("outside", len(self._outside)))
        node = Node(self, Meta.of(tensor), key, value=value, version=version_of(value), number=next(self._count))
        self._outside[id(tensor)] = (weakref.ref(tensor), version_of(tensor), node)
        return node

    def record(
        self,
        name: str,
        run: Callable[..., Any],
        flat: list[Any],
        spec: pytree.TreeSpec,
        metas: Sequence[Meta],
        written: tuple[int, ...] = (),
    ) -> tuple[Node, ...] | None:
        """Record an operation and return the nodes of its results; None if an argument has no name.

        Args:
            name: name of the operation, for its key.
            run: the operation.
            flat: leaves of its arguments, with nodes for lazy tensors and for tensors from outside.
            spec: structure of the arguments.
            metas: of the results, those of the changed arguments last.
            written: places of the arguments that it changes.
        """
        parts = self._rows_in_order(name, flat)
        if parts is None:
            parts = [name, spec]
            for leaf in flat:
                parts.append(Of(leaf.key) if isinstance(leaf, Node) else (type(leaf).__name__, leaf))
            if len(parts) > 3 and parts[3] == ("int", self.size) and name.split(".")[1:2] in _SIZED:
                parts[3] = "batch"
        try:
            key = self.keys.number(tuple(parts))
        except TypeError:  # it cannot be hashed
            return None
        nodes = tuple(
            Node(
                self,
                meta,
                self.keys.number((Of(key), output)) if output else key,
                Call(run, tuple(flat), spec, written),
                number=next(self._count),
            )
            for output, meta in enumerate(metas)
        )
        for node in nodes:
            node.siblings = nodes
        return nodes

    def _rows_in_order(self, name: str, flat: list[Any]) -> list[Any] | None:
        """One name for a stack of the same tensor of all samples in order, whatever their number."""
        if name != "aten.stack.default" or len(flat) - self.size not in (0, 1) or flat[self.size :] not in ([], [0]):
            return None
        rows = [leaf.row for leaf in flat[: self.size] if isinstance(leaf, Node)]
        if rows and rows[0] is not None and rows == [(position, rows[0][1]) for position in range(self.size)]:
            return ["rows", rows[0][1]]
        return None

    def show(self, node: Node) -> LazyTensor:
        """Return a lazy tensor for a node."""
        lazy = LazyTensor(node)
        node.shown = weakref.ref(lazy)
        self._shown.append(node.shown)
        return lazy

    def load(self, rows: Iterable[Node]) -> None:
        """Load the values of row nodes."""
        missing = [node for node in rows if node.value is None]
        if missing:
            self._touched()
            places = [node.row for node in missing if node.row is not None]
            for node, value in zip(missing, self._load_rows(places), strict=True):
                node.value = value

    @property
    def has_outside(self) -> bool:
        """Whether a recorded operation reads a tensor that the program made."""
        return bool(self._outside)

    def settle(self, computed_only: bool = False) -> None:
        """Compute every lazy tensor that the program still holds.

        Args:
            computed_only: not those that only stand for loaded data.
        """
        for reference in self._shown:
            lazy = reference()
            if not isinstance(lazy, LazyTensor) or lazy.node.value is not None:
                continue
            if not computed_only or any(node.is_unit for node in lazy.node.before(_never)):
                lazy.node.compute()
        self._shown = [reference for reference in self._shown if reference() is not None]

    def change(self) -> None:
        """Prepare for a change in place: what a lazy tensor stands for afterwards has no name."""
        self.settle()
        for reference in self._shown:
            lazy = reference()
            if isinstance(lazy, LazyTensor):
                value = lazy.node.compute()
                lazy.node = Node(self, lazy.node.meta, UNKNOWN, value=value, number=next(self._count))


def _never(node: Node) -> bool:
    return False


class _Kind(enum.Enum):
    """What an operation does with a lazy argument."""

    PURE = enum.auto()  # it can be recorded
    FACTORY = enum.auto()  # it reads only the shape
    WRITES = enum.auto()  # it changes an argument
    WRITES_AT_RANDOM = enum.auto()
    READS = enum.auto()  # it needs the values now


@functools.cache
def _kind(func: Any) -> _Kind:
    name = func._schema.name.split("::")[1]
    if func.namespace == "aten" and (name in _FACTORIES or name.startswith("new_")):
        return _Kind.FACTORY
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    # Batch normalisation changes its running statistics, and its schema does not say so.
    pure = func.namespace == "aten" and tags.isdisjoint(func.tags) and "batch_norm" not in name
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
    return pytree.tree_unflatten([node.tape.show(node) for node in nodes], form)


def _record_write(
    func: Any, flat: list[Any], spec: pytree.TreeSpec, lazies: list[LazyTensor], written: list[LazyTensor]
) -> bool:
    """Record a change in place, unless another lazy tensor shares the memory; return whether it was recorded."""
    tape = written[0].node.tape
    if len(written) != 1 or tape.is_shared(written[0]):
        return False
    places = tuple(place for place, leaf in enumerate(flat) if leaf is written[0])
    recorded = _nodes_of(func, flat, spec, lazies, places)
    if recorded is None or len(places) != 1:
        return False
    written[0].node = recorded[0][-1]
    written[0].node.shown = weakref.ref(written[0])
    return True


def _nodes_of(
    func: Any, flat: list[Any], spec: pytree.TreeSpec, lazies: list[LazyTensor], written: tuple[int, ...]
) -> tuple[tuple[Node, ...], pytree.TreeSpec] | None:
    tape = lazies[0].node.tape
    for leaf in flat:
        if isinstance(leaf, LazyTensor):
            if leaf.node.tape is not tape or leaf.node.key == UNKNOWN or leaf.requires_grad:
                return None
        elif isinstance(leaf, Tensor) and (leaf.requires_grad or type(leaf) not in (Tensor, torch.nn.Parameter)):
            return None
    try:
        found = _shapes(func, spec, *[_known_of(leaf) for leaf in flat])
    except TypeError:  # an argument cannot be hashed
        return None
    if found is None:
        return None
    metas = [*found[0], *(Meta.of(flat[place]) for place in written)]
    nodes = tape.record(str(func), func, [tape.node_of(leaf) for leaf in flat], spec, metas, written)
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
    names = "numpy tolist data_ptr __array__ storage untyped_storage _typed_storage __dlpack__ is_shared share_memory_"
    names += " map_ apply_ map2_ set_ type new _is_view __reduce_ex__"
    found = {getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)}
    return frozenset({*found, Tensor.data.__get__, Tensor.data.__set__})  # type: ignore[attr-defined]


class LazyTensor(Tensor):
    """Stands for a tensor that was not loaded or computed yet.

    Attributes:
        node: what it stands for.
    """

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> LazyTensor:  # noqa: D102
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

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what leaves torch; all else goes to `__torch_dispatch__`."""
        if func in _reads():
            args = pytree.tree_map_only(LazyTensor, plain, args)
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
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
                return args[0] if len(written) == 1 and written[0] is args[0] else tuple(written)
            for tape in {id(lazy.node.tape): lazy.node.tape for lazy in written}.values():
                tape.change()
        owners = {id(lazy.node.compute()): lazy for lazy in lazies}
        values = [leaf.node.value if isinstance(leaf, LazyTensor) else leaf for leaf in flat]
        args, kwargs = pytree.tree_unflatten(values, spec)
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda leaf: owners.get(id(leaf), leaf), result)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).clone()


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the values of a lazy one."""
    return tensor.node.compute() if isinstance(tensor, LazyTensor) else tensor


def version_of(tensor: Tensor) -> int:
    """Return the counter that rises with each change in place; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version
