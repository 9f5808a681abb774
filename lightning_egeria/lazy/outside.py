"""Tensors of the program in a recorded computation, also as they would be in longer or shorter batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_egeria.lazy.meta import version_of
from lightning_egeria.lazy.replay import replay
from lightning_egeria.lazy.squares import Square
from lightning_egeria.lazy.tape import Node
from lightning_egeria.snapshots.digests import bytes_of, contents, same_bits, stems

LEAST_LENGTH = 16  # that batches are padded to, if there was a longer one
LEAST_PADDING = 2  # positions, besides the first: where only the last two values are equal, that may be no padding


def has_samples(leaf: Node) -> bool:
    """Whether a tensor from outside has a row for each sample of its batch."""
    return leaf.value is not None and leaf.value.ndim > 0 and leaf.value.shape[0] == leaf.tape.size


class _Role(NamedTuple):
    """What a tensor from outside was in all batches so far.

    Attributes:
        ndim: number of its dimensions.
        with_samples: whether it has a row for each sample.
        dims: others that have the length of the batch; None before the first batch whose length matters.
    """

    ndim: int
    with_samples: bool
    dims: tuple[int, ...] | None


class Outside:
    """Tensors of the program that a computation begins with, also as they would be in longer or shorter batches.

    Each keeps its role from the first batch on: a batch may be as long as it is large, or as another tensor is wide.
    One without samples must stay as it was, or begin as it did: whoever tried whether rows depend on one another tried
    it with that. Where a batch does not fit, nothing is known of it.

    Attributes:
        longest: length of the longest padded batch so far.
        version: rises when a dimension turns out not to have the length of the batch.
    """

    def __init__(self) -> None:
        self.longest = self.version = 0
        self._roles: dict[int, _Role] = {}
        self._first: dict[int, Tensor] = {}  # of those without samples, in host memory
        self._tables: dict[int, Tensor] = {}  # the longest of them
        self._paddings: dict[int, Tensor] = {}
        self._squares: dict[int, Square] = {}
        self._on_host = WeakKeyDictionary[Node, Tensor]()
        self._stamps = WeakKeyDictionary[Node, tuple[tuple[bool, int, int], npt.NDArray[np.uint64]]]()
        self._lengths = WeakKeyDictionary[Node, tuple[int, list[int]]]()

    @property
    def has_tables(self) -> bool:
        """Whether there are tensors without samples that grow with the length, such as the numbers of positions."""
        return any(role.dims and not role.with_samples for role in self._roles.values())

    def has_samples(self, leaf: Node) -> bool:
        """Whether a tensor from outside has a row for each sample of its batch."""
        role = self._roles.get(leaf.key)
        return role.with_samples if role is not None else has_samples(leaf)

    def fits(self, node: Node, ragged: bool) -> bool:
        """Whether the tensors that a boundary activation follows from are what they were before.

        Args:
            node: boundary activation.
            ragged: whether it is ``[samples, length, ...]`` and the length matters.
        """
        length = node.meta.shape[1] if ragged else None
        found = [self._fits(leaf, length) for leaf in node.leaves() if leaf.row is None]  # each of them learns
        return all(found)

    def is_padded(self, node: Node) -> bool:
        """Whether a boundary activation, ``[samples, length, ...]``, seems to follow from padded samples."""
        if len(node.meta.shape) < 3 or node.meta.stride[1] < max(node.meta.stride[2:]):
            return False
        length = node.meta.shape[1]
        texts = [leaf for leaf in node.leaves() if leaf.row is None and len(self._dims(leaf, length)) == 1]
        return any(map(self.has_samples, texts)) and self.fits(node, ragged=True)

    def sample_lengths(self, node: Node) -> list[int]:
        """Return the length of each sample without its padding, of which one position counts; in the batch's order.

        Args:
            node: boundary activation of a padded batch that fits, ``[samples, length, ...]``.
        """
        version, known = self._lengths.get(node, (-1, []))
        if version == self.version:
            return known
        found = np.ones(node.tape.size, np.int64)
        for _, value in self._texts(node):
            found = np.maximum(found, stems(value))
        for _, masks in self._texts(node, 2):
            found = np.maximum(found, Square.lengths(masks).cpu().numpy())
        self._lengths[node] = self.version, found.tolist()
        return self._lengths[node][1]

    def learn_padding(self, node: Node) -> bool:
        """Learn from the first batch with padding what that is; return whether it is known, and as before."""
        own = self.sample_lengths(node)
        for leaf, masks in self._texts(node, 2):
            square = Square.learnt(masks, own, self._squares.get(leaf.key))
            if square is None:
                return False
            self._squares[leaf.key] = square
        short = [place for place, one in enumerate(own) if one <= node.meta.shape[1] - LEAST_PADDING]
        for leaf, value in self._texts(node):
            ends = value[short, -1]
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
        if room <= length or not self.learn_padding(node):
            return length
        outside = [leaf for leaf in node.leaves() if leaf.row is None]
        return room if all(self.at_length(leaf, length, room) is not None for leaf in outside) else length

    def at_length(self, leaf: Node, before: int, length: int) -> Tensor | None:
        """Return a tensor as it would be in a batch of another length than before; None if that is not known."""
        value, role = leaf.value, self._roles.get(leaf.key)
        if value is None or role is None:
            return None
        if not (dims := role.dims or ()) or length <= before:
            return _cut(value, dims, length)
        if not role.with_samples:
            value = self._tables[leaf.key]
            return _cut(value, dims, length) if min(value.shape[dim] for dim in dims) >= length else None
        square = self._squares.get(leaf.key)
        if square is not None and len(dims) == 2:
            return square.longer(value.movedim(dims, (1, 2)), length).movedim((1, 2), dims).contiguous()
        padding = self._paddings.get(leaf.key)
        if padding is None or len(dims) > 1:
            return None
        moved = value.movedim(dims[0], 0)
        more = padding.to(value.device).expand(length - before, *moved.shape[1:])
        return torch.cat([moved, more]).movedim(0, dims[0]).contiguous()

    def replayed(
        self, node: Node, places: Sequence[int], length: int | None = None, given: Mapping[Node, Tensor] | None = None
    ) -> Tensor | None:
        """Compute a boundary activation of a batch that fits anew, as `replay` does.

        With a ``length``, texts are padded to it.
        """
        value_of: Callable[[Node], Tensor | None] = attrgetter("value")
        if length is not None and length != node.meta.shape[1]:
            value_of = partial(self.at_length, before=node.meta.shape[1], length=length)
        return replay(node, places, given, value_of, self.has_samples)

    def stamps(self, node: Node, ragged: bool) -> npt.NDArray[np.uint64] | None:
        """Return a digest of what the program made of each sample, ``[samples]``; None if it cannot be known.

        With ``ragged``, samples that are padded to another length have the same digest.
        """
        size = node.tape.size
        if not node.tape.has_outside:
            return np.zeros(size, np.uint64)
        if not self.fits(node, ragged):
            return None
        known, state = self._stamps.get(node), (ragged, self.version, len(self._paddings) + len(self._squares))
        if known is not None and known[0] == state:
            return known[1]
        texts = {leaf.key: value for leaf, value in self._texts(node)} if ragged else {}
        masks = {leaf.key: value for leaf, value in self._texts(node, 2)} if ragged else {}
        outside = [leaf for leaf in node.leaves() if leaf.row is None]
        states = [xxhash.xxh3_64() for _ in range(size)]
        for leaf in outside:
            role, value = self._roles[leaf.key], self.on_host(leaf)
            head = f"{leaf.key} {tuple(value.shape[1:])} {value.dtype}"
            if leaf.key in texts:
                grows, padding = texts[leaf.key], self._paddings.get(leaf.key)
                head = f"{leaf.key} {tuple(grows.shape[2:])} {value.dtype}"
                parts = contents(grows, padding)
            elif leaf.key in masks and leaf.key in self._squares:
                head = f"{leaf.key} {tuple(masks[leaf.key].shape[3:])} {value.dtype}"
                parts = self._squares[leaf.key].cores(masks[leaf.key])
            elif role.with_samples:
                parts = [bytes_of(row) for row in value]
            elif role.dims:
                continue  # it begins as in all other batches of this run
            else:
                parts = [bytes_of(value)] * size
            for one, part in zip(states, parts, strict=True):
                one.update(head.encode())
                one.update(part)
        found = np.array([one.intdigest() if outside else 0 for one in states], np.uint64)
        found.flags.writeable = False
        self._stamps[node] = state, found
        return found

    def _texts(self, node: Node, dims: int = 1) -> Iterator[tuple[Node, Tensor]]:
        """The tensors with a row for each sample and so many dimensions of the length, which come right behind it."""
        for leaf in node.leaves():
            role = self._roles.get(leaf.key)
            if leaf.row is None and role is not None and role.with_samples and len(role.dims or ()) == dims:
                value = self.on_host(leaf) if dims == 1 or leaf.value is None else leaf.value
                yield leaf, value.movedim(role.dims or (), tuple(range(1, 1 + dims)))

    def on_host(self, leaf: Node) -> Tensor:
        """Return the value of a tensor from outside in host memory, where its rows are looked at one by one."""
        assert leaf.value is not None  # tensors from outside have values
        if leaf not in self._on_host:
            self._on_host[leaf] = leaf.value.detach().cpu()
        return self._on_host[leaf]

    def _fits(self, leaf: Node, length: int | None) -> bool:
        value = leaf.value
        if value is None or leaf.version != version_of(value):
            return False
        role = self._roles.get(leaf.key)
        if role is None:
            role = _Role(value.ndim, has_samples(leaf), None)
            if not role.with_samples:
                self._first[leaf.key], self._tables[leaf.key] = self.on_host(leaf).clone(), value.clone()
        if value.ndim != role.ndim:
            return False
        if length is not None:
            dims = self._dims(leaf, length)
            self.version += role.dims is not None and dims != role.dims
            role = role._replace(dims=dims)
        self._roles[leaf.key] = role
        if role.with_samples:
            return has_samples(leaf)
        return same_bits(self.on_host(leaf), self._first[leaf.key]) or self._goes_on(leaf.key, value, role.dims or ())

    def _dims(self, leaf: Node, length: int) -> tuple[int, ...]:
        """Dimensions that have had the length of the batch in all batches, and in this one."""
        role, shape = self._roles.get(leaf.key), () if leaf.value is None else leaf.value.shape
        dims = role.dims if role is not None and role.dims is not None else range(self.has_samples(leaf), len(shape))
        return tuple(dim for dim in dims if dim < len(shape) and shape[dim] == length)

    def _goes_on(self, key: int, value: Tensor, dims: tuple[int, ...]) -> bool:
        """Whether a table begins as those of other batches do; the longest one is kept."""
        longest = self._tables[key]
        if not dims:
            return False
        common = min(value.shape[dims[0]], longest.shape[dims[0]])
        if not same_bits(_cut(value, dims, common), _cut(longest, dims, common)):
            return False
        if value.shape[dims[0]] > common:
            self._tables[key] = value.clone()
        return True


def _cut(value: Tensor, dims: Sequence[int], length: int) -> Tensor:
    for dim in dims:
        value = value.narrow(dim, 0, length)
    return value
