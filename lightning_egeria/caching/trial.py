"""Whether the output at a boundary is, row by row, a function of the samples: tried on one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_egeria.caching.lengths import Lengths, sample_lengths
from lightning_egeria.caching.replay import replay
from lightning_egeria.caching.tape import Node, version_of
from lightning_egeria.snapshots.digests import same_bits
from lightning_egeria.snapshots.random_state import RandomState, preserved_random_state

ROWS = 16  # that are run again, or half of a smaller batch, to compare two lengths
AGREEING = 2  # batches of another size with the bits of the entries, before it is used
ROUNDING = 32  # last bits by which a row may differ at another place in the batch


def try_boundary(node: Node, value: Tensor) -> tuple[str | None, bool]:
    """Run the recorded computation again with the samples in another order.

    A row that keeps its place must not change with the other rows of the batch, bit for bit, whatever the precision. A
    row at another place may differ by rounding.

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
        if not same_bits(replay(node, range(size)), value):
            return "the same input gave another output (is it random, or does it depend on earlier batches?)", False
        if RandomState.current() != before:
            return "the frozen layers draw random numbers", False
        if size == 1:
            return None, True
        for kept in (0, 1):
            # All others are one and the same sample, so that a mean over the batch, say, becomes another one.
            for other in (1 - kept, (size // 2) | 1 - kept):
                mixed = replay(node, [place if place % 2 == kept else other % size for place in range(size)])
                if mixed is None:
                    return "its computation fits only these samples (are they padded one by one?)", False
                if not same_bits(mixed[kept::2], value[kept::2]):
                    return "the output of one sample depends on the other samples of its batch", False
        turned = [(turn, replay(node, [(place + turn) % size for place in range(size)])) for turn in _spread(size)]
    exact = True
    for turn, moved in turned:
        if moved is None:
            return "its computation does not repeat", False
        exact = exact and same_bits(moved.roll(turn, 0), value)
        if not exact and not is_rounding(moved.roll(turn, 0), value):
            return "the output of a sample depends on its place in the batch", False
    return None, exact


def smaller_sizes(node: Node, value: Tensor) -> list[int]:
    """Return the sizes of smaller batches that have the same bits: halves, quarters and eighths that were tried."""
    size, found = node.tape.size, []
    with preserved_random_state(), torch.no_grad():
        for smaller in dict.fromkeys(-(-size // share) for share in (8, 4, 2)):
            tries = [[(start + place) % size for place in range(smaller)] for start in _spread(size)]
            if 1 < smaller < size and all(same_bits(replay(node, places), value[places]) for places in tries):
                found.append(smaller)
    return found


def judge_length(known: Lengths, node: Node, value: Tensor, sizes: BatchSizes) -> None:
    """Compare the bits of a padded batch with those of shorter lengths that came before.

    Args:
        known: lengths that came before; this one is added.
        node: boundary activation of a batch, with all rows loaded.
        value: the activation, ``[samples, length, ...]``.
        sizes: batches with the same bits as a whole one.
    """
    size, length = node.tape.size, value.shape[1]
    known.add(length)
    others = known.to_compare(length)
    own = sample_lengths(node) if others else []
    for other in others:
        places = [place for place, one in enumerate(own) if one <= other]
        if len(places) < min(ROWS, size) // 2:
            continue
        rows = sizes.size_for(min(ROWS, len(places)), size)
        places = [places[number % len(places)] for number in range(rows)]
        with preserved_random_state(), torch.no_grad():
            found = replay(node, places, length=other)
        known.keep(length, other, same_bits(found, value[places, :other]))


class BatchSizes:
    """Sizes of batches whose rows have the same bits as those that entries were computed in."""

    def __init__(self, size: int | None = None, smaller: Sequence[int] = ()) -> None:
        self._verdicts = dict.fromkeys([*smaller, *([size] if size is not None else [])], True)
        self._agreed: dict[int, int] = {}
        self._smaller = list(smaller)

    def verdict(self, size: int) -> bool | None:
        """Whether rows of this size have the same bits; None if nobody knows yet."""
        return self._verdicts.get(size)

    def size_for(self, count: int, size: int) -> int:
        """Return a size to compute some rows in, with the same bits as in a batch of ``size``."""
        return min((one for one in self._smaller if count <= one < size), default=size)

    def compared(self, size: int, same: bool) -> bool | None:
        """A batch of a size without verdict had the same bits as its entries, or not; return the verdict."""
        self._agreed[size] = self._agreed.get(size, 0) + 1
        if not same or self._agreed[size] >= AGREEING:
            self._verdicts[size] = same
        return self._verdicts.get(size)


def is_rounding(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape differ by a few last bits of their largest value at most."""
    if first.shape != second.shape or not first.dtype.is_floating_point:
        return False
    largest = second.abs().amax().double()
    most = ROUNDING * torch.finfo(first.dtype).eps * largest
    return bool((first.double() - second.double()).abs().amax() <= most)


def _spread(size: int) -> list[int]:
    """Some places of a batch; all of a small one, where a few values could agree by chance."""
    return list(range(size)) if size <= 16 else [1, 2, size // 2, size - 1]


def _has_rows(leaf: Node, size: int) -> bool:
    return leaf.value is not None and leaf.value.ndim > 0 and leaf.value.shape[0] == size
