"""What the network is given in a step: the tensors of the batch as they came, or something else?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.samples import same_leaf

KEPT_TENSORS = 64  # of arguments that depend on the length of the batch, masks say


class Layout(NamedTuple):
    """How a view lies in the memory of what it is a view of.

    Attributes:
        offset: of its first value.
        dimensions: how many it has.
        order: to each dimension of the other, the one of the view that goes through memory as fast; dimensions of size
            1, which batches may have by chance, are left out.
    """

    offset: int
    dimensions: int
    order: dict[int, int]

    @classmethod
    def of(cls, leaf: Tensor, view: Tensor) -> Layout:
        """The layout of a view of ``leaf``."""
        ours, theirs = ([dim for dim in order_of(tensor) if tensor.shape[dim] > 1] for tensor in (leaf, view))
        order = dict(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else {}
        return cls(int(view.storage_offset()) - int(leaf.storage_offset()), view.ndim, order)

    def agrees(self, other: Layout) -> bool:
        """Whether the same may have been done to leaves that differ in size."""
        same = all(other.order.get(dim, place) == place for dim, place in self.order.items())
        return same and self[:2] == other[:2]


class Part(NamedTuple):
    """How a view of a part of each row lies in the memory of a contiguous tensor: all tokens but the last, say.

    Attributes:
        row_shape: of the tensor, without its first dimension.
        offset: of the view's first element in a row.
        shape: of the view, without its first dimension.
        stride: of the view.
    """

    row_shape: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Tensor, view: Tensor) -> Part | None:
        """The part of each row of ``leaf`` that a view of it is; None: each row of it is not of one row of ``leaf``."""
        if not (leaf.ndim and view.ndim and leaf.is_contiguous() and view.numel() and len(leaf) == len(view)):
            return None
        offset = int(view.storage_offset()) - int(leaf.storage_offset())
        last = offset + sum((size - 1) * step for size, step in zip(view.shape[1:], view.stride()[1:], strict=True))
        if view.stride(0) != leaf.stride(0) or offset < 0 or last >= leaf.stride(0):
            return None
        return cls(tuple(leaf.shape[1:]), offset, tuple(view.shape[1:]), tuple(view.stride()))


class GivenInput(NamedTuple):
    """An argument of the network that comes from the batch, by number, and the number of its leaf in that."""

    argument: int
    leaf: int
    layout: Layout | Part | None  # None: a copy, and no view


class _Kept(NamedTuple):
    tensor: Tensor
    version: int | None
    copy: Tensor


class OtherArguments:
    """What the network is given besides the batch: its frozen front may read it, so it must stay what it was.

    For each argument, one value is known for batches of each size and length: the first one that came. Numbers, texts
    and tensors are compared; what other objects hold is not.

    Args:
        inputs: numbers of the tensors, among all arguments, that come from the batch.
    """

    def __init__(self, inputs: set[int]) -> None:
        self._inputs = inputs
        self._free: set[int] = set()
        self._names: set[tuple[str, bool]] | None = None
        self._plain: dict[Any, Any] = {}
        self._tensors: dict[Any, _Kept] = {}

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, Tensor]]:
        """Those that do not come from the batch, with their numbers."""
        numbered = enumerate(tensor_leaves((args, kwargs)))
        return [(number, leaf) for number, leaf in numbered if number not in self._inputs]

    def leave_free(self, numbers: set[int]) -> None:
        """These tensors are read behind the frozen front only."""
        self._free |= numbers

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, length: int | None) -> str | None:
        """Name of an argument that is not what it was; None: there is none.

        Args:
            args: of the call of the network.
            kwargs: of that.
            samples: of the batch.
            length: that they are padded to, if they differ in length.
        """
        numbers = itertools.count()
        numbered = [
            (next(numbers) if isinstance(leaf, Tensor) else None, name, leaf)
            for name, leaf in _named_leaves(args, kwargs)
        ]
        others = [(number, name, leaf) for number, name, leaf in numbered if number not in self._inputs]
        names = {(name, number is not None) for number, name, _ in others}
        self._names = names if self._names is None else self._names
        for name, _ in sorted(names ^ self._names):
            return name
        for number, name, leaf in others:
            if number not in self._free and not self._is_known(leaf, (name, samples, length)):
                return name
        return None

    def _is_known(self, leaf: Any, key: tuple[Any, ...]) -> bool:
        if not isinstance(leaf, Tensor):
            return same_leaf(self._plain.setdefault(key, leaf), leaf)
        key = (*key, leaf.shape, leaf.dtype, leaf.device)
        kept = self._tensors.get(key)
        if kept is not None and kept.tensor is leaf and None is not kept.version == version_of(leaf):
            return True  # without waiting for the device
        if kept is not None and not same_leaf(kept.copy, leaf.detach()):
            return False
        copy = kept.copy if kept is not None else leaf.detach().clone()
        self._tensors[key] = _Kept(leaf, version_of(leaf), copy)
        if len(self._tensors) > KEPT_TENSORS:
            del self._tensors[next(iter(self._tensors))]
        return True


def _named_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors in the order of `tensor_leaves`, and what can be compared like them."""
    for place, value in enumerate(args):
        yield from _leaves(f"number {place + 1}", value)
    for name, value in kwargs.items():
        yield from _leaves(repr(name), value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, bool, int, float, complex, str, bytes)) or value is None:
        if not isinstance(value, Tensor) or value.layout is torch.strided:
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, Sequence):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(f"{name}.{field.name}", getattr(value, field.name))


def is_given(leaf: Tensor, argument: Tensor) -> bool:
    """Whether the network is given this tensor of the batch: itself, another view of all of it, or a copy."""
    if shares_memory(leaf, argument):
        return _has_rows_of(leaf, argument)
    return has_values_of(leaf, argument)


def has_values_of(leaf: Tensor, other: Tensor) -> bool:
    """Whether a tensor, on the device and in the dtype of the other, has its values, bit for bit."""
    if leaf.numel() != other.numel():
        return False
    moved = leaf.to(other.device, other.dtype)
    return same_leaf(moved.reshape(-1), other.detach().reshape(-1))


def is_view(leaf: Tensor, argument: Tensor, layout: Layout | Part) -> bool:
    """Whether the network is given a view of this tensor, of that layout."""
    if isinstance(layout, Part):
        return shares_memory(leaf, argument) and Part.of(leaf, argument) == layout
    shared = shares_memory(leaf, argument) and _has_rows_of(leaf, argument)
    return shared and Layout.of(leaf, argument).agrees(layout)


def _has_rows_of(leaf: Tensor, view: Tensor) -> bool:
    """Whether each row of a view in the same memory is all of that row of the leaf, in whatever order."""
    if leaf.numel() != view.numel() or leaf.storage_offset() != view.storage_offset():
        return False
    if not leaf.ndim or not view.ndim or len(leaf) < 2:
        return True
    return len(leaf) == len(view) and leaf.stride(0) == view.stride(0)


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are, at least, views of one memory."""
    return first.device == second.device and first.untyped_storage()._cdata == second.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int | None:
    """How often it was changed in place; None: nobody counts that."""
    return None if tensor.is_inference() else tensor._version


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
