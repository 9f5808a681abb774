"""Tensors of the program that a recorded computation begins with: normalised images, masks, positions.

No sample stands behind such a tensor as far as the tape knows, so an entry holds for it only by comparison:

*   The first batch gives each tensor its *role*: it has a row for each sample, or it is one for the whole batch. The
    role stays, because a length may equal a batch size by chance.
*   A tensor with rows is part of the entry: the digests of its row are its stamp (`Outside.stamps`), and an entry with
    another stamp is a miss.
*   A tensor for the whole batch must keep the bits of the first batch. Whether rows depend on one another was probed
    with those; with others a batch is computed (`Outside.fits`).
*   A tensor that was written to after it was recorded (`Node.version`) is no longer what the computation read, so the
    batch does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from lightning_egeria.caching.record.meta import version_of
from lightning_egeria.caching.record.replay import replay
from lightning_egeria.caching.record.tape import Node
from lightning_egeria.core.snapshots.digests import bytes_of, same_bits


def has_samples(leaf: Node) -> bool:
    """Whether a tensor from outside has a row for each sample of its batch."""
    return leaf.value is not None and leaf.value.ndim > 0 and leaf.value.shape[0] == leaf.tape.size


class _Role(NamedTuple):
    """What a tensor from outside was in the first batch: number of its dimensions, and whether it has samples."""

    ndim: int
    with_samples: bool


class Outside:
    """Tensors of the program that a computation begins with.

    Each keeps its role from the first batch on, because another dimension may be as large as a batch. One without
    samples must stay as it was: the test of whether rows depend on one another was made with that. Where a batch does
    not fit, its values are computed.
    """

    def __init__(self) -> None:
        self._roles: dict[int, _Role] = {}
        self._first: dict[int, Tensor] = {}  # of those without samples, in host memory
        self._on_host = WeakKeyDictionary[Node, Tensor]()
        self._digests = WeakKeyDictionary[Node, npt.NDArray[np.uint64]]()

    def has_samples(self, leaf: Node) -> bool:
        """Whether a tensor from outside has a row for each sample of its batch."""
        role = self._roles.get(leaf.key)
        return role.with_samples if role is not None else has_samples(leaf)

    def fits(self, node: Node) -> bool:
        """Whether the tensors from outside that a value follows from are what they were before."""
        if not node.tape.has_outside:
            return True
        found = [self._fits(leaf) for leaf in node.leaves() if leaf.row is None]  # each of them learns
        return all(found)

    def replayed(self, node: Node, places: Sequence[int], given: Mapping[Node, Tensor] | None = None) -> Tensor | None:
        """Compute a value of a batch that fits once more, as `replay` does."""
        return replay(node, places, given, has_samples=self.has_samples)

    def stamps(self, node: Node) -> npt.NDArray[np.uint64] | None:
        """Return a digest of what the program made of each sample, ``[samples]``; None if it cannot be known."""
        size = node.tape.size
        if not node.tape.has_outside:
            return np.zeros(size, np.uint64)
        if not self.fits(node):
            return None
        found = np.zeros(size, np.uint64)
        for leaf in node.leaves():
            if leaf.row is None:
                found = found * np.uint64(0x9E3779B97F4A7C15) ^ self._digest(leaf)
        return found

    def _digest(self, leaf: Node) -> npt.NDArray[np.uint64]:
        """Return a digest of each row of a tensor, ``[samples]``; the same for all where it has no samples."""
        known = self._digests.get(leaf)
        if known is None:
            assert leaf.value is not None  # tensors from outside have values
            value = self._host(leaf)
            head = f"{leaf.key} {tuple(value.shape[1:])} {value.dtype}".encode()
            rows = [bytes_of(row) for row in value] if self._roles[leaf.key].with_samples else [bytes_of(value)]
            digests = np.array([xxhash.xxh3_64_intdigest(head + row) for row in rows], np.uint64)
            known = self._digests[leaf] = digests if len(rows) > 1 else np.repeat(digests, leaf.tape.size)
        return known

    def _host(self, leaf: Node) -> Tensor:
        """Return the value of a tensor from outside in host memory, where its rows are looked at one by one."""
        assert leaf.value is not None
        if leaf not in self._on_host:
            self._on_host[leaf] = leaf.value.detach().cpu()
        return self._on_host[leaf]

    def _fits(self, leaf: Node) -> bool:
        value = leaf.value
        if value is None or leaf.version != version_of(value):
            return False
        role = self._roles.get(leaf.key)
        if role is None:
            role = self._roles[leaf.key] = _Role(value.ndim, has_samples(leaf))
            if not role.with_samples:
                self._first[leaf.key] = self._host(leaf).clone()
        if value.ndim != role.ndim:
            return False
        return has_samples(leaf) if role.with_samples else same_bits(self._host(leaf), self._first[leaf.key])
