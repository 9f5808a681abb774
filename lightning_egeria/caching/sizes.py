"""Batches whose rows have the same bits: of other sizes, and texts that are padded to another length.

An entry of a padded batch serves every batch that is not longer, where the output at a position does not change with
the padding behind it: see `judge_length`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_egeria.lazy.tape import Node
from lightning_egeria.snapshots.digests import bytes_of, same_bits

ROOM = 2  # times the length of the first batch: what longer batches compute is not kept
LEAST_ROOM = 64
AGREEING = 2  # batches of another size with the bits of the entries, before it is used


def is_padded(node: Node) -> bool:
    """Whether a boundary activation, ``[samples, length, ...]``, seems to follow from samples padded to its length."""
    if len(node.meta.shape) < 3 or node.meta.stride[1] < max(node.meta.stride[2:]):
        return False
    return any(has_samples(leaf) and along(leaf, node.meta.shape[1]) is not None for leaf in node.leaves())


def sample_lengths(node: Node) -> list[int]:
    """Return the length of each sample without its padding, of which one position counts; in the order of the batch.

    Args:
        node: boundary activation of a padded batch, ``[samples, length, ...]``.
    """
    found = [1] * node.tape.size
    for leaf in node.leaves():
        value = along(leaf, node.meta.shape[1])
        if value is not None and has_samples(leaf):
            found = [max(before, _stem(row)) for before, row in zip(found, value.movedim(1, 0), strict=True)]
    return found


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


class Lengths:
    """Lengths of batches, in classes whose members give the same bits wherever there are samples.

    >>> lengths = Lengths()
    >>> for length in (40, 30, 50):
    ...     lengths.add(length)
    >>> lengths.to_compare(50)
    [40, 30]
    >>> lengths.keep(50, 40, True), lengths.keep(50, 30, False)
    (None, None)
    >>> lengths.serves(np.array([50, 40, 30]), 40).tolist()
    [True, True, False]
    """

    def __init__(self) -> None:
        self._class: dict[int, int] = {}
        self._apart: set[frozenset[int]] = set()

    def add(self, length: int) -> None:
        """A batch of a length has come."""
        self._class.setdefault(length, length)

    def to_compare(self, length: int) -> list[int]:
        """Return the longest shorter length of each class that was not compared with the one of a length."""
        own = self._class[length]
        found: dict[int, int] = {}
        for other, number in self._class.items():
            if other < length and number != own and frozenset((number, own)) not in self._apart:
                found[number] = max(other, found.get(number, 0))
        return sorted(found.values(), reverse=True)

    def keep(self, length: int, other: int, same: bool) -> None:
        """Keep whether two lengths give the same bits."""
        own, number = self._class[length], self._class[other]
        if not same:
            self._apart.add(frozenset((own, number)))
            return
        self._class = {one: own if at == number else at for one, at in self._class.items()}
        self._apart = {frozenset(own if at == number else at for at in pair) for pair in self._apart}

    def serves(self, own: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.bool_]:
        """Return which entries, of these lengths, may be used in a batch of another length."""
        same = [one for one, at in self._class.items() if one > length and at == self._class.get(length)]
        found: npt.NDArray[np.bool_] = (own == length) | np.isin(own, same)
        return found


class Tables:
    """Tensors of the program that grow with the length of the batch, such as the numbers of its positions."""

    def __init__(self) -> None:
        self._longest: dict[int, Tensor] = {}
        self._with_samples: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._longest)

    def is_as_before(self, leaf: Node) -> bool:
        """Whether a tensor has a row for each sample, or has none, as in the first batch: its shape may mislead."""
        return self._with_samples.setdefault(leaf.key, has_samples(leaf)) == has_samples(leaf)

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
