"""Texts that are padded to the longest of their batch: an entry serves every batch that is not longer than itself.

That is right where the output at a position does not change with the padding behind it; see `judge_length`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_egeria.caching.tape import Node
from lightning_egeria.snapshots.digests import bytes_of, same_bits

ROOM = 2  # times the length of the first batch: what longer batches compute is not kept
LEAST_ROOM = 64


def sample_lengths(node: Node) -> list[int] | None:
    """Return the length of each sample before it was padded, in the order of the batch.

    Args:
        node: boundary activation of a batch, ``[samples, length, ...]``.

    Returns:
        None if the samples were not padded, as far as is known: then ``length`` is not that of the longest sample.
    """
    tape, leaves = node.tape, node.leaves()
    if len(node.meta.shape) < 3:
        return None
    padded, size = node.meta.shape[1], tape.size
    found = [0] * size
    for leaf in leaves:
        if leaf.row is not None and leaf.meta.shape:
            place = tape.order.index(leaf.row[0]) if tape.order is not None else leaf.row[0]
            found[place] = max(found[place], leaf.meta.shape[0])
    if not any(found):
        for leaf in leaves:
            value = along(leaf, padded)
            if value is not None and has_samples(leaf):
                found = [max(before, _stem(row)) for before, row in zip(found, value.movedim(1, 0), strict=True)]
    return found if max(found) == padded and min(found) > 0 else None


def has_samples(leaf: Node) -> bool:
    """Whether a tensor from outside has a row for each sample of its batch."""
    return leaf.value is not None and leaf.value.ndim > 0 and leaf.value.shape[0] == leaf.tape.size


def along(leaf: Node, length: int) -> Tensor | None:
    """Return a tensor from outside with the one dimension of a length in front; None if it has none, or several."""
    if leaf.row is not None or leaf.value is None:
        return None
    dims = [dim for dim, size in enumerate(leaf.value.shape) if size == length and (dim or not has_samples(leaf))]
    return leaf.value.movedim(dims[0], 0) if len(dims) == 1 else None


def content(row: Tensor) -> bytes:
    """Return a row's values without the padding at its end, and one value of that: the same however long it is padded.

    >>> import torch
    >>> content(torch.tensor([5, 6, 0])) == content(torch.tensor([5, 6, 0, 0, 0]))
    True
    """
    return bytes_of(row[: _stem(row)])


def _stem(row: Tensor) -> int:
    """Length of a row without the padding at its end, of which one position counts."""
    if not row.numel():
        return len(row)
    raw = np.frombuffer(bytes_of(row), np.uint8).reshape(len(row), -1)  # of floats, the bits count
    others = np.flatnonzero((raw != raw[-1]).any(1))
    return int(others[-1]) + 2 if len(others) else 1


class Lengths:
    """Lengths of batches that were tried: whether they have the same bits as shorter ones."""

    def __init__(self) -> None:
        self._verdicts: dict[int, bool] = {}

    def knows(self, length: int) -> bool:
        """Whether a length was tried."""
        return length in self._verdicts

    def keep(self, length: int, same: bool) -> None:
        """Keep a verdict."""
        self._verdicts[length] = same

    def serves(self, own: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.bool_]:
        """Return which entries, of these lengths, may be used in a batch of another length."""
        longer = own > length
        if longer.any():
            proven = [one for one, same in self._verdicts.items() if same]
            longer &= np.isin(own, proven) & (length in proven)
        found: npt.NDArray[np.bool_] = (own == length) | longer
        return found


class Tables:
    """Tensors of the program that grow with the length of the batch, such as the numbers of its positions."""

    def __init__(self) -> None:
        self._longest: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._longest)

    def goes_on(self, key: int, value: Tensor) -> bool:
        """Whether a tensor begins as those of other batches do.

        Args:
            key: number of the tensor.
            value: the tensor, with the length in front; the longest one is kept.
        """
        longest = self._longest.setdefault(key, value.clone())
        common = min(len(longest), len(value))
        if not same_bits(value[:common], longest[:common]):
            return False
        if len(value) > len(longest):
            self._longest[key] = value.clone()
        return True


def form_length(length: int) -> int:
    """Return the length of a ragged form, from that of the first batch: a power of two, so that later runs agree."""
    return max(LEAST_ROOM, 1 << (ROOM * length - 1).bit_length())
