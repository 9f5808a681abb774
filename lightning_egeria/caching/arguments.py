"""What the network is given in a step: the tensors of the batch as they came, or something else?"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightning_egeria.caching.samples import same_leaf


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


class GivenInput(NamedTuple):
    """An argument of the network that comes from the batch, by number, and the number of its leaf in that."""

    argument: int
    leaf: int
    layout: Layout | None  # None: a copy, and no view


def is_given(leaf: Tensor, argument: Tensor) -> bool:
    """Whether the network is given this tensor of the batch: itself, another view of all of it, or a copy."""
    if leaf.numel() != argument.numel():
        return False
    if shares_memory(leaf, argument):
        return True
    moved = leaf.to(argument.device, argument.dtype).reshape(-1)
    return same_leaf(moved, argument.detach().reshape(-1))


def is_view(leaf: Tensor, argument: Tensor, layout: Layout) -> bool:
    """Whether the network is given a view of all of this tensor, of that layout."""
    shared = leaf.numel() == argument.numel() and shares_memory(leaf, argument)
    return shared and Layout.of(leaf, argument).agrees(layout)


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
