"""Batches of other sizes whose rows have the same bits, and texts that are padded to another length.

An entry of a padded batch serves every batch that is not longer, where the output at a position does not depend on the
padding behind it: see `judge_length`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_egeria.lazy.tape import Node, version_of
from lightning_egeria.snapshots.digests import bytes_of, same_bits

ROOM = 2  # times the length of the first batch: what longer batches compute is not kept
LEAST_ROOM = 64
LEAST_LENGTH = 16  # that batches are padded to, if there was a longer one
AGREEING = 2  # batches of another size with the bits of the entries, before it is used


def has_samples(leaf: Node) -> bool:
    """Whether a tensor from outside has a row for each sample of its batch."""
    return leaf.value is not None and leaf.value.ndim > 0 and leaf.value.shape[0] == leaf.tape.size


def content(row: Tensor, padding: Tensor | None = None) -> bytes:
    """Return a row's values without the padding at its end, and one value of that: the same however long it is padded.

    Args:
        row: ``[length, ...]``.
        padding: value of a position that is padding; None takes a value that is repeated at the end for that.

    >>> import torch
    >>> content(torch.tensor([5, 6, 0])) == content(torch.tensor([5, 6, 0, 0, 0]))
    True
    >>> content(torch.tensor([5, 6]), torch.tensor(0)) == content(torch.tensor([5, 6, 0, 0]))
    True
    """
    if padding is None or not row.numel():
        return bytes_of(row[: _stem(row)])
    if same_bits(row[-1], padding):
        row = row[: _stem(row) - 1]
    return bytes_of(row) + bytes_of(padding)


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
    """Whether a text's output is the same however far it is padded, as far as batches of some lengths have told.

    Attributes:
        agree: whether it is, to rounding; None if nobody knows yet.
        exact: whether all bits were the same so far.

    >>> lengths = Lengths()
    >>> lengths.serves(np.array([50, 40, 30]), 40).tolist()
    [False, True, False]
    >>> lengths.judged(50, same=True, exact=True)
    >>> lengths.serves(np.array([50, 40, 30]), 40).tolist()
    [True, True, False]
    """

    def __init__(self) -> None:
        self.agree: bool | None = None
        self.exact = True
        self._judged: set[int] = set()

    def is_new(self, length: int) -> bool:
        """Whether a batch of a length may tell more."""
        return self.agree is not False and length not in self._judged

    def judged(self, length: int, same: bool, exact: bool) -> None:
        """A batch of a length has told whether shorter or longer ones have the same output, and the same bits."""
        self._judged.add(length)
        self.exact = self.exact and exact
        self.agree = same and self.agree is not False

    def serves(self, own: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.bool_]:
        """Return which entries, of these lengths, may be used in a batch of another length."""
        found: npt.NDArray[np.bool_] = own >= length if self.agree else own == length
        return found


class Outside:
    """Tensors of the program that the front is called with, also as they would be in longer or shorter batches.

    Whether one has a row for each sample is kept from the first batch: later a batch may be as long as it is large.

    Attributes:
        longest: length of the longest padded batch so far.
    """

    def __init__(self) -> None:
        self.longest = 0
        self._with_samples: dict[int, bool] = {}
        self._tables: dict[int, Tensor] = {}
        self._paddings: dict[int, Tensor] = {}

    @property
    def has_tables(self) -> bool:
        """Whether there are tensors without samples that grow with the length, such as the numbers of positions."""
        return bool(self._tables)

    def has_samples(self, leaf: Node) -> bool:
        """Whether a tensor from outside has a row for each sample of its batch."""
        return self._with_samples.setdefault(leaf.key, has_samples(leaf))

    def fits(self, leaf: Node) -> bool:
        """Whether a tensor may be what it was in the first batch: one of samples must have a row for each."""
        return has_samples(leaf) or not self.has_samples(leaf)

    def is_padded(self, node: Node) -> bool:
        """Whether a boundary activation, ``[samples, length, ...]``, seems to follow from padded samples."""
        if len(node.meta.shape) < 3 or node.meta.stride[1] < max(node.meta.stride[2:]):
            return False
        return any(self.has_samples(leaf) for leaf, _ in self._growing(node))

    def sample_lengths(self, node: Node) -> list[int]:
        """Return the length of each sample without its padding, of which one position counts; in the batch's order.

        Args:
            node: boundary activation of a padded batch, ``[samples, length, ...]``.
        """
        found = [1] * node.tape.size
        for leaf, value in self._growing(node):
            if self.has_samples(leaf):
                found = [max(before, _stem(row)) for before, row in zip(found, value.movedim(1, 0), strict=True)]
        return found

    def learn_padding(self, node: Node) -> bool:
        """Learn from the first batch with padding what that is; return whether it is known, and as before."""
        short = [place for place, one in enumerate(self.sample_lengths(node)) if one < node.meta.shape[1]]
        for leaf, value in self._growing(node):
            if not self.has_samples(leaf):
                continue
            ends = value[-1, short]
            if short:
                self._paddings.setdefault(leaf.key, ends[0].clone())
            padding = self._paddings.get(leaf.key)
            if padding is None or not same_bits(ends, padding.expand_as(ends)):
                return False
        return True

    def room(self, node: Node) -> int:
        """Return the length to compute a padded batch at, so that entries serve longer batches as well.

        No length that the program has not used itself: its positions may end there.
        """
        length = node.meta.shape[1]
        self.longest = max(self.longest, length)
        room = min(self.longest, max(LEAST_LENGTH, 1 << (length - 1).bit_length()))
        return room if room > length and self.learn_padding(node) else length

    def at_length(self, leaf: Node, before: int, length: int) -> Tensor | None:
        """Return a tensor as it would be in a batch of another length than before; None if that is not known."""
        value = leaf.value
        if value is None:
            return None
        dims = [dim for dim in range(int(self.has_samples(leaf)), value.ndim) if value.shape[dim] == before]
        if length <= before or not dims:
            for dim in dims:
                value = value.narrow(dim, 0, length)
            return value
        if len(dims) > 1:
            return None
        if not self.has_samples(leaf):
            table = self._tables.get(leaf.key)
            return table[:length].movedim(0, dims[0]) if table is not None and len(table) >= length else None
        moved, padding = value.movedim(dims[0], 0), self._paddings.get(leaf.key)
        if padding is None:
            return None
        more = padding.expand(length - before, *moved.shape[1:])
        return torch.cat([moved, more]).movedim(0, dims[0]).contiguous()

    def stamps(self, node: Node, ragged: bool) -> npt.NDArray[np.uint64] | None:
        """Return a digest of what the program made of each sample, ``[samples]``; None if it cannot be known.

        With ``ragged``, samples that are padded to another length have the same digest.
        """
        size = node.tape.size
        if not node.tape.has_outside:
            return np.zeros(size, np.uint64)
        outside = [leaf for leaf in node.leaves() if leaf.row is None]
        states = [xxhash.xxh3_64() for _ in range(size)]
        for leaf in outside:
            if leaf.value is None or leaf.version != version_of(leaf.value) or not self.fits(leaf):
                return None
            value, with_samples = leaf.value.detach(), self.has_samples(leaf)
            grows = self._along(leaf, node.meta.shape[1]) if ragged else None
            if grows is not None and with_samples:
                head = f"{leaf.key} {tuple(grows.shape[2:])} {value.dtype}"
                parts = [content(row, self._paddings.get(leaf.key)) for row in grows.movedim(1, 0)]
            elif grows is not None and self._goes_on(leaf.key, grows):
                continue
            elif with_samples:
                head = f"{leaf.key} {tuple(value.shape[1:])} {value.dtype}"
                parts = [bytes_of(row) for row in value.cpu()]
            else:
                head = f"{leaf.key} {tuple(value.shape)} {value.dtype}"
                parts = [bytes_of(value)] * size
            for state, part in zip(states, parts, strict=True):
                state.update(head.encode())
                state.update(part)
        return np.array([state.intdigest() if outside else 0 for state in states], np.uint64)

    def _growing(self, node: Node) -> Iterator[tuple[Node, Tensor]]:
        """The tensors that a boundary activation follows from and that have its length, which comes in front."""
        for leaf in node.leaves():
            value = self._along(leaf, node.meta.shape[1])
            if value is not None:
                yield leaf, value

    def _along(self, leaf: Node, length: int) -> Tensor | None:
        """A tensor with the one dimension of a length in front; None if it has none, or several."""
        if leaf.row is not None or leaf.value is None:
            return None
        with_samples = self.has_samples(leaf)
        dims = [dim for dim, size in enumerate(leaf.value.shape) if size == length and (dim or not with_samples)]
        return leaf.value.movedim(dims[0], 0) if len(dims) == 1 else None

    def _goes_on(self, key: int, value: Tensor) -> bool:
        """Whether a table begins as those of other batches do; the longest one is kept."""
        longest = self._tables.setdefault(key, value.clone())
        common = min(len(longest), len(value))
        if not same_bits(value[:common], longest[:common]):
            return False
        if len(value) > len(longest):
            self._tables[key] = value.clone()
        return True


def form_length(length: int) -> int:
    """Return the length of a ragged form, from that of the first batch: a power of two, so that later runs agree."""
    return max(LEAST_ROOM, 1 << (ROOM * length - 1).bit_length())
