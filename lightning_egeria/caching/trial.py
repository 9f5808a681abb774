"""Whether the output at a boundary is, row by row, a function of the samples: tried on one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_egeria.caching.lazy import Node, version_of
from lightning_egeria.snapshots.random_state import RandomState, preserved_random_state

ROUNDING = 32  # last bits by which a row may differ at another place in the batch


def try_boundary(node: Node, value: Tensor) -> tuple[str | None, bool]:
    """Run the recorded computation again with the samples in another order.

    A row that keeps its place must not change with the other rows of the batch, bit for bit. A row at another place may
    differ by rounding.

    Args:
        node: boundary activation of a batch, with all rows loaded.
        value: the activation as the network computed it, ``[samples, ...]``.

    Returns:
        Why it cannot be cached, or None; and whether rows are the same bits at each place in the batch.
    """
    size = node.tape.size
    leaves = node.leaves()
    if value.ndim == 0 or value.shape[0] != size:
        return f"its shape {tuple(value.shape)} does not begin with the {size} samples of the batch", False
    if not any(leaf.row is not None for leaf in leaves) and not any(_has_rows(leaf, size) for leaf in leaves):
        return "it depends on no tensor of the batch", False
    if any(leaf.row is None and leaf.value is not None and leaf.version != version_of(leaf.value) for leaf in leaves):
        return "the frozen layers change their input in place", False
    with preserved_random_state(), torch.no_grad():
        before = RandomState.current()
        if not same_bits(_run(node, lambda place: place), value):
            return "the same input gave another output (is it random, or does it depend on earlier batches?)", False
        if RandomState.current() != before:
            return "the frozen layers draw random numbers", False
        if size == 1:
            return None, True
        for kept in (0, 1):
            moving = [place for place in range(size) if place % 2 != kept]
            after = dict(zip(moving, moving[1:] + moving[:1], strict=True))
            mixed = _run(node, lambda place, after=after: after.get(place, place))
            if not same_bits(mixed[kept::2], value[kept::2]):
                return "the output of one sample depends on the other samples of its batch", False
        turned = _run(node, lambda place: (place + 1) % size).roll(1, 0)
    if same_bits(turned, value):
        return None, True
    if not is_rounding(turned, value):
        return "the output of a sample depends on its place in the batch", False
    return None, False


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.dtype.is_floating_point:
        return torch.equal(first, second)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


def is_rounding(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape differ by a few last bits of their largest value at most."""
    if first.shape != second.shape or not first.dtype.is_floating_point:
        return False
    largest = second.abs().amax().double()
    most = ROUNDING * torch.finfo(first.dtype).eps * largest
    return bool((first.double() - second.double()).abs().amax() <= most)


def _has_rows(leaf: Node, size: int) -> bool:
    return leaf.value is not None and leaf.value.ndim > 0 and leaf.value.shape[0] == size


def _run(node: Node, sample_at: Callable[[int], int]) -> Tensor:
    """Compute a node anew from the leaves, with sample ``sample_at(place)`` at each place of the batch."""
    order = node.before(lambda _: False)
    tape = node.tape
    tape.load(one for one in order if one.row is not None)
    rows = {one.row: one for one in order if one.row is not None}
    waiting = Counter(argument for one in order for argument in one.arguments())
    values: dict[Node, Tensor] = {}
    for one in order:
        if one in values:
            continue
        if one.row is not None:
            place, number = one.row
            source = rows.get((sample_at(place), number), one)
            values[one] = _known(source)
        elif one.call is None:
            value = _known(one)
            order_of_rows = [sample_at(place) for place in range(tape.size)]
            values[one] = value[order_of_rows] if _has_rows(one, tape.size) else value
        else:
            for sibling, result in zip(one.siblings, one.call(values), strict=True):
                values[sibling] = result
            for argument in one.arguments():
                waiting[argument] -= 1
                if not waiting[argument]:
                    values.pop(argument, None)
    return values[node]


def _known(node: Node) -> Tensor:
    if node.value is None:
        raise RuntimeError("a leaf without a value")
    return node.value
