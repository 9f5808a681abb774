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


class MadeArguments:
    """Arguments that the frozen front of the network reads, and that are not what the data loader gave.

    Images that are normalised on the device, say, or a mask that is made of the tokens. Nobody knows how they are made,
    so an entry of the cache holds a digest of the row that it was computed of, and stands for the same row only.

    Args:
        numbers: of their tensors among all arguments.
    """

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self.numbers = tuple(numbers)
        self._padding: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"{self.numbers} {self._padding}"

    def digests(
        self, given: Sequence[Tensor], samples: int, lengths: Sequence[int] | None, length: int | None
    ) -> Digests:
        """A digest of what each sample has in all of these arguments.

        Where samples differ in length, each dimension that is as long as the batch is padded is cut to the sample's own
        length. What is behind that must be one value, the same in each batch.

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
            rows = given[number].detach()
            if rows.shape[:1] != (samples,):
                return np.full(samples, UNKNOWN, np.uint64)
            head = f"{number} {rows.dtype} {order_of(rows)} ".encode()
            for place, row in enumerate(rows.cpu()):
                if lengths is not None:
                    row, behind = _split(row, lengths[place], length)
                    known[place] = known[place] and self._is_padding(number, behind)
                hashes[place].update(head)
                hashes[place].update(bytes_of(row))
        found = [max(1, one.intdigest()) if is_known else UNKNOWN for one, is_known in zip(hashes, known, strict=True)]
        return np.array(found, np.uint64)

    def _is_padding(self, number: int, behind: Tensor) -> bool:
        if not behind.numel():
            return True
        first = behind[0]
        padding = self._padding.setdefault(number, bytes_of(first))
        return bool((behind == first).all()) and padding == bytes_of(first)


def _split(row: Tensor, own: int, length: int | None) -> tuple[Tensor, Tensor]:
    """What a sample has in a padded row, and what is behind its end, ``[values]``."""
    inside = torch.zeros(row.shape, dtype=torch.bool)
    part, kept = inside, row
    for dim, size in enumerate(row.shape):
        if size == length:
            part, kept = part.narrow(dim, 0, own), kept.narrow(dim, 0, own)
    part.fill_(True)
    return kept, row[~inside]
