"""What the training step, or a hook, makes of the batch for the frozen front: known again by a digest of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_egeria.caching.arguments import order_of
from lightning_egeria.caching.samples import bytes_of

Digests = npt.NDArray[np.uint64]
DIGEST_BYTES = 8
UNKNOWN = 0  # in the place of a digest
CHANGES_TO_VARY = 3  # batches with rows that are not what they were, and more of these than of others


class MadeArguments:
    """Arguments that the frozen front of the network reads, and that are not what the data loader gave.

    Images that are normalised on the device, say, or a mask that is made of the tokens. Nobody knows how they are made,
    so an entry of the cache holds a digest of the row that it was computed of, and stands for the same row only.

    Args:
        numbers: of their tensors among all arguments.
    """

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self.numbers = tuple(numbers)
        self._positions: dict[int, list[int]] = {}
        self._padding: dict[int, bytes] = {}
        self._changed = self._same = 0

    def __repr__(self) -> str:
        return f"{self.numbers} {self._positions} {self._padding}"

    def varies(self, changed: bool) -> bool:
        """Whether it is something else each time, as far as the batches show of which this is one more."""
        self._changed, self._same = self._changed + changed, self._same + (not changed)
        return changed and self._changed >= CHANGES_TO_VARY and self._changed > self._same

    def digests(
        self, given: Sequence[Tensor], samples: int, lengths: Sequence[int] | None, length: int | None
    ) -> Digests:
        """A digest of what each sample has in all of these arguments.

        Where samples differ in length, the dimensions that are as long as the first batch is padded are cut to the
        sample's own length. What is behind that must be one value, the same in each batch.

        Args:
            given: all tensors that the network is given.
            samples: of the batch.
            lengths: of the samples; None: they do not differ.
            length: that they are padded to.

        Returns:
            ``[samples]``; `UNKNOWN` for a sample that cannot be known again.
        """
        hashes = [xxhash.xxh3_64() for _ in range(samples)]
        known = [True] * samples
        for number in self.numbers:
            try:
                rows = given[number].detach().cpu()
                if rows.shape[:1] != (samples,):
                    return np.full(samples, UNKNOWN, np.uint64)
                self._add(number, rows, lengths, length, hashes, known)
            except (RuntimeError, TypeError):  # a tensor without values in memory: a sparse or a nested one, say
                return np.full(samples, UNKNOWN, np.uint64)
        found = [max(1, one.intdigest()) if is_known else UNKNOWN for one, is_known in zip(hashes, known, strict=True)]
        return np.array(found, np.uint64)

    def _add(
        self,
        number: int,
        rows: Tensor,
        lengths: Sequence[int] | None,
        length: int | None,
        hashes: list[xxhash.xxh3_64],
        known: list[bool],
    ) -> None:
        order = _order_of(rows)
        in_memory = [dim - 1 for dim in order if dim > 0]
        in_memory += [dim for dim in range(rows.ndim - 1) if dim not in in_memory]
        positions: list[int] = []
        if lengths is not None:
            as_long = [dim for dim, size in enumerate(rows.shape[1:]) if size == length]
            positions = self._positions.setdefault(number, as_long)
        for place, row in enumerate(rows):
            if lengths is not None:
                if lengths[place] > (length or 0) or any(row.shape[dim] != length for dim in positions):
                    known[place] = False
                    continue
                row, behind = _split(row, lengths[place], positions)
                known[place] = known[place] and self._is_padding(number, behind)
            hashes[place].update(f"{number} {row.dtype} {tuple(row.shape)} {order} ".encode())
            hashes[place].update(bytes_of(row.permute(in_memory)))

    def _is_padding(self, number: int, behind: Tensor) -> bool:
        if not behind.numel():
            return True
        first = behind[0]
        padding = self._padding.setdefault(number, bytes_of(first))
        return bool((behind == first).all()) and padding == bytes_of(first)


def _order_of(rows: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory; without those of size 1; a batch of one is the slowest."""
    order = [dim for dim in order_of(rows) if dim == 0 or rows.shape[dim] > 1]
    return tuple(order) if len(rows) > 1 else (0, *(dim for dim in order if dim > 0))


def _split(row: Tensor, own: int, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What a sample has in a padded row, and what is behind its end, ``[values]``."""
    inside = torch.zeros(row.shape, dtype=torch.bool)
    part, kept = inside, row
    for dim in positions:
        part, kept = part.narrow(dim, 0, own), kept.narrow(dim, 0, own)
    part.fill_(True)
    return kept, row[~inside]
