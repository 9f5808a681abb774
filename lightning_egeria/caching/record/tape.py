"""Recorded operations: how a tensor follows from the rows of a batch.

The key of a node names the whole computation behind it: nodes with equal keys are the same function of the same rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_egeria.caching.record.keys import Keys, Of
from lightning_egeria.caching.record.meta import MOST_BYTES, Meta, is_small, stacked, version_of
from lightning_egeria.core.snapshots.digests import same_bits, with_gaps
from lightning_egeria.errors import CacheError

UNKNOWN = -1  # key of a value that something outside the tape has made or changed
# Operations whose list of sizes begins with the batch size.
_SIZED = (["view"], ["_unsafe_view"], ["reshape"], ["expand"])


class Call:
    """A recorded operation.

    Args:
        run: the operation; takes the arguments, returns a tensor or a tree with tensors.
        flat: leaves of the arguments, with nodes for tensors; or a function that makes them when they are wanted.
        spec: their structure.
        written: places, among ``flat``, of the nodes that the operation changes in place. It gets copies, and these
            are results of the call too, behind the others.
        sized: whether the second argument is the number of samples in the batch.
    """

    __slots__ = ("_flat", "run", "sized", "spec", "written")

    def __init__(
        self,
        run: Callable[..., Any],
        flat: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
        spec: pytree.TreeSpec,
        written: tuple[int, ...] = (),
        sized: bool = False,
    ) -> None:
        self.run, self.spec, self.written, self.sized = run, spec, written, sized
        self._flat = flat

    @property
    def flat(self) -> tuple[Any, ...]:
        """Leaves of the arguments."""
        if not isinstance(self._flat, tuple):
            self._flat = self._flat()
        return self._flat

    def __call__(self, values: Mapping[Node, Tensor], size: int | None = None) -> list[Tensor]:
        """Run it with these values for its nodes, and another number of samples; return all its results."""
        flat = [values[leaf] if isinstance(leaf, Node) else leaf for leaf in self.flat]
        if self.sized and size is not None:
            flat[1] = size
        for place in self.written:
            flat[place] = with_gaps(flat[place], MOST_BYTES)
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        run: object = self.run
        with contextlib.nullcontext() if isinstance(run, Unit) else torch.no_grad():
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
        name: number of the computation, or, until it is asked for, the parts of its name with nodes for
            arguments; `UNKNOWN` if something outside the tape made the value.
        call: operation that computes it; None for a leaf.
        siblings: nodes of all results of the operation, in order.
        row: position of the sample in the batch and number of the tensor in the sample; None for others.
        rows: number of the tensor of which it stacks that of all samples, in order; None for others.
        value: the tensor, once it is known.
        version: version counter of a leaf from outside, when it was recorded.
        number: place in the order in which the nodes of the tape were made.
        base: node whose memory it shares, for the result of a view; else the node itself.
        shown: the lazy tensor, while the program holds it.
        frozen: whether a call of a frozen module is behind it.
    """

    tape: Tape
    meta: Meta
    name: int | tuple[Any, ...]
    call: Call | None = None
    siblings: tuple[Node, ...] = ()
    row: tuple[int, int] | None = None
    rows: int | None = None
    value: Tensor | None = None
    version: int = 0
    number: int = 0
    base: Node | None = None
    shown: weakref.ref[Tensor] | None = None
    frozen: bool = False

    @property
    def key(self) -> int:
        """Number of the computation. Tensors from outside are numbered in the order in which this is asked for."""
        if isinstance(self.name, int):
            return self.name
        for node in self.before(lambda one: isinstance(one.name, int)):
            node.name = self.tape.number(node)
        return self.key

    @property
    def is_held(self) -> bool:
        """Whether the program holds its lazy tensor."""
        return self.shown is not None and self.shown() is not None

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

    def ask(self) -> Tensor:
        """Return the value for the program. The batch may have it, if a frozen module is behind it."""
        owner = self.tape.owner
        return owner.asked(self) if self.frozen and owner is not None else self.compute()

    def compute(self) -> Tensor:
        """Return the value; load and compute whatever it needs."""
        if self.value is None:
            order = self.before(lambda node: node.value is not None)
            self.tape.load(node for node in order if node.row is not None)
            for node in order:
                if node.value is None and node.call is not None:
                    node.call_now()
            for node in order:
                if node is not self and node.call is not None and node.rows is None and not node.is_held:
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


@functools.cache
def _spec_of_a_stack(count: int) -> pytree.TreeSpec:
    """Structure of the arguments of `torch.stack`."""
    return pytree.tree_flatten((([0] * count,), {}))[1]


class Tape:
    """The recorded operations on the tensors of one batch.

    Args:
        keys: numbers of computations, shared by all batches.
        size: samples of the batch.
        load_rows: returns the tensors of samples: takes pairs of a position and a tensor's number.
        touched: called when the values of rows are needed, before they are loaded.
        owner: the batch, for those who know a tensor of it only.

    Attributes:
        size: rows of the batch.
        is_over: whether nothing more is recorded.
        order: position of the sample in each row; None if it is that of the plan, as far as is known.
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
        self.order: list[int] | None = None
        self.is_over = False
        self._load_rows = load_rows
        self._touched = touched
        self._count = 0
        self._shown: list[weakref.ref[Tensor]] = []
        self._outsiders = itertools.count()  # a counter, because Python reuses id()
        self._outside: dict[int, tuple[weakref.ref[Tensor], int, Node]] = {}

    def row(self, position: int, number: int, meta: Meta, value: Tensor | None = None) -> Node:
        """Return the node of tensor ``number`` of the sample at ``position``."""
        key = self.keys.number(("row", number, position))
        return Node(self, meta, key, row=(position, number), value=value, number=self._next())

    def rows_of(self, number: int, meta: Meta) -> Node:
        """Return the node that stacks tensor ``number`` of each sample, in the order of the plan.

        Most steps never ask for the rows themselves, so their nodes are made when they are wanted.
        """
        if self.order is None:
            self.order = list(range(self.size))
        first = self._next(self.size)

        def rows() -> tuple[Node, ...]:
            keys = [self.keys.number(("row", number, position)) for position in range(self.size)]
            return tuple(
                Node(self, meta, key, row=(position, number), number=first + position)
                for position, key in enumerate(keys)
            )

        call = Call(torch.ops.aten.stack.default, rows, _spec_of_a_stack(self.size))
        key = self.keys.number(("rows", number, 0))
        node = Node(self, stacked(meta, self.size), key, call, rows=number, number=self._next())
        node.siblings = (node,)
        return node

    def _next(self, count: int = 1) -> int:
        """Return the next number of a node, and reserve ``count`` numbers."""
        self._count += count
        return self._count - count

    def is_shared(self, lazy: Any) -> bool:
        """Whether another lazy tensor that the program holds shares the memory of this one."""
        return any(other is not lazy and other.node.root is lazy.node.root for other in self.held())

    def outside(self, tensor: Tensor) -> Node:
        """Return the node of a tensor that is not lazy. One that `is_small` is copied, in case it changes later."""
        found = self._outside.get(id(tensor))
        if found is not None and _is_still(tensor, *found):
            return found[2]
        value = with_gaps(tensor, MOST_BYTES) if is_small(tensor) else tensor
        meta, number = Meta.of(tensor), self._next()
        node = Node(self, meta, ("outside",), value=value, version=version_of(value), number=number)
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
        number = self._rows_in_order(name, flat)
        parts: list[Any] = ["rows", number] if number is not None else [name, spec]
        if number is None:
            now = isinstance(run, Unit)  # frozen layers come in one order, whatever else the program does
            for leaf in flat:
                known = (Of(leaf.key) if now else leaf) if isinstance(leaf, Node) else (type(leaf).__name__, leaf)
                parts.append(known)
        sized = len(parts) > 3 and parts[3] == ("int", self.size) and name.split(".")[1:2] in _SIZED
        if sized:
            parts[3] = "batch"
        try:
            hash(tuple(parts))
        except TypeError:  # an argument has no name
            return None
        names = [(*parts, output) for output in range(len(metas))]
        return self.add(names, Call(run, tuple(flat), spec, written, sized), metas, number)

    def number(self, node: Node) -> int:
        """Return the key of a node whose arguments have theirs."""
        parts = node.name if isinstance(node.name, tuple) else ()
        if node.call is None:
            parts = (*parts, next(self._outsiders))
        return self.keys.number(tuple(Of(part.key) if isinstance(part, Node) else part for part in parts))

    def add(
        self, names: Iterable[int | tuple[Any, ...]], call: Call, metas: Sequence[Meta], rows: int | None = None
    ) -> tuple[Node, ...]:
        """Return new nodes for the results of a call, with their names."""
        nodes = tuple(
            Node(self, meta, name, call, rows=rows, number=self._next())
            for name, meta in zip(names, metas, strict=True)
        )
        run: object = call.run
        if isinstance(run, Unit) or any(isinstance(leaf, Node) and leaf.frozen for leaf in call.flat):
            for node in nodes:
                node.frozen = True
        for node in nodes:
            node.siblings = nodes
        return nodes

    def _rows_in_order(self, name: str, flat: list[Any]) -> int | None:
        """Number of the tensor that an operation stacks of each sample; None for another operation."""
        if name != "aten.stack.default" or not isinstance(flat[0], Node):
            return None
        rows = [leaf.row for leaf in flat if isinstance(leaf, Node) and leaf.row is not None]
        if flat[len(rows) :] not in ([], [0]) or len({number for _, number in rows}) != 1:
            return None
        order = [position for position, _ in rows]
        if self.order is None:  # a collate function may have sorted samples, or left some out
            self.order, self.size = order, len(order)
        return rows[0][1] if order == self.order else None

    def shows(self, lazy: Any, node: Node) -> None:
        """Remember that the program holds a lazy tensor for a node."""
        node.shown = weakref.ref(lazy)
        self._shown.append(node.shown)

    def held(self) -> list[Any]:
        """Return the lazy tensors that the program holds."""
        self._shown = [reference for reference in self._shown if reference() is not None]
        return [lazy for reference in self._shown if (lazy := reference()) is not None]

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
        """Compute every lazy tensor that the program still holds. Reading one that is lost raises an error.

        Args:
            computed_only: not those that only stand for loaded data.
        """
        for lazy in self.held():
            if computed_only and not lazy.node.frozen:
                continue
            with contextlib.suppress(Exception):  # it is raised when the value is read
                lazy.node.ask()

    def _share_memory(self) -> None:
        """Have views of one tensor share its memory, though each of them may have been served by itself."""
        of_roots: dict[int, list[Node]] = {}
        for lazy in self.held():
            of_roots.setdefault(id(lazy.node.root), []).append(lazy.node)
        for nodes in of_roots.values():
            root = nodes[0].root
            views = [node for node in nodes if node is not root]
            if len({id(node) for node in nodes}) < 2 or not any(node.frozen for node in views):
                continue
            root.ask()
            for node in views:
                for one in node.before(functools.partial(operator.is_, root)):
                    one.value = None
            for node in views:
                node.compute()

    def was_changed(self, node: Node) -> None:
        """Take what lazy tensors stand for that share memory with a node, whose value other code changed in place."""
        root = node.root
        for lazy in self.held():
            if lazy.node.root is root:
                value = lazy.node.ask()
                lazy.node = Node(self, lazy.node.meta, UNKNOWN, value=value, number=self._next())

    def change(self) -> None:
        """Prepare for a change in place: what a lazy tensor stands for afterwards has no name."""
        self.settle()
        self._share_memory()
        for lazy in self.held():
            value = lazy.node.ask()
            lazy.node = Node(self, lazy.node.meta, UNKNOWN, value=value, number=self._next())


def _is_still(tensor: Tensor, reference: weakref.ref[Tensor], version: int, node: Node) -> bool:
    """Whether a tensor is that of a node, with the same values: numpy writes to one without counting it."""
    if reference() is not tensor or version != version_of(tensor):
        return False
    comparable = node.value is not tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return not comparable or same_bits(node.value, tensor)
