"""Attention masks with a row and a column for each position, as they would be in a batch of another length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_egeria.snapshots.digests import bytes_of, same_bits


class Square(NamedTuple):
    """How a mask goes on behind a text, as all short texts so far have told.

    Such masks are a core, ``[own, own]``, of the text itself. Columns behind it are all one value: nothing looks at
    padding. Rows behind it look at what the last one looks at, or are that value too.

    Attributes:
        padding: the value, a single number, in host memory.
        repeats: whether rows go on as the last one.

    >>> valid = torch.tensor([[True, True, False], [True, True, True]])
    >>> masks = valid.unsqueeze(1).expand(2, 3, 3)
    >>> square = Square.learnt(masks, [2, 3], None)
    >>> square
    Square(padding=tensor(False), repeats=True)
    >>> square.longer(masks, 4)[0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    >>> square.cores(masks) == square.cores(square.longer(masks, 4))
    True
    """

    padding: Tensor
    repeats: bool

    @classmethod
    def learnt(cls, masks: Tensor, own: list[int], known: Square | None) -> Square | None:
        """Return how masks go on; None if these tell otherwise than what is ``known``, or nothing.

        Args:
            masks: ``[samples, length, length, ...]``, queries before keys.
            own: length of each text, of whose padding one position counts.
            known: from other batches.
        """
        flat = _flat(masks)
        short = [(mask, at) for mask, at in zip(flat, own, strict=True) if 1 < at < flat.shape[1]]
        if not short:
            return known
        padding = short[0][0][0, -1, 0]
        if not all(same_bits(mask[:, -1], padding.expand_as(mask[:, -1])) for mask, _ in short):
            return None
        ends = [(mask[at - 1], mask[at - 2]) for mask, at in short]
        if all(same_bits(end, last) for end, last in ends):
            found = cls(padding.to("cpu", copy=True), repeats=True)
        elif all(same_bits(end, padding.expand_as(end)) for end, _ in ends):
            found = cls(padding.to("cpu", copy=True), repeats=False)
        else:
            return None
        agrees = known is None or (same_bits(known.padding, found.padding) and known.repeats == found.repeats)
        return found if agrees else None

    def longer(self, masks: Tensor, length: int) -> Tensor:
        """Return masks, ``[samples, shorter, shorter, ...]``, as they would be at a length."""
        count, before, *rest = (masks.shape[0], masks.shape[1], *masks.shape[3:])
        padding = self.padding.to(masks.device)
        wide = torch.cat([masks, padding.expand(count, before, length - before, *rest)], 2)
        more = wide[:, -1:].expand(count, length - before, *wide.shape[2:])
        return torch.cat([wide, more if self.repeats else padding.expand(more.shape)], 1)

    @staticmethod
    def lengths(masks: Tensor) -> Tensor:
        """Return the length of each text without its padding, of which one position counts: ``[samples]``."""
        if not masks.numel():
            return torch.ones(len(masks), dtype=torch.int64)
        flat = _flat(masks)
        rows = (flat != flat[:, -1:]).flatten(2).any(2)
        columns = (flat != flat[:, :, -1:]).any(3).any(1)
        places = torch.arange(2, 2 + flat.shape[1], device=flat.device)
        return torch.where(rows | columns, places, 1).amax(1)

    def cores(self, masks: Tensor) -> list[bytes]:
        """Return what names each mask: its core, the same at each length, or all of it if it goes on otherwise."""
        if not masks.numel():
            return [b""] * len(masks)
        flat = _flat(masks)
        count, length = flat.shape[:2]
        places, padding = torch.arange(length, device=flat.device), self.padding.to(flat.device)
        seen = (flat != padding).any(3).any(1)
        own = torch.where(seen, places + 1, 0).amax(1)
        if self.repeats:
            rows = torch.minimum(places, (own - 1).clamp(min=0).unsqueeze(1))
            made = flat[torch.arange(count, device=flat.device).unsqueeze(1), rows]
        else:
            made = torch.where((places < own.unsqueeze(1))[:, :, None, None], flat, padding)
        goes_on = (made == flat).flatten(1).all(1).tolist()
        how = b"%d" % self.repeats + bytes_of(self.padding)
        return [
            how + b"%d " % at + bytes_of(mask[:at, :at]) if fine else b"all %d " % length + bytes_of(mask)
            for mask, at, fine in zip(flat, own.tolist(), goes_on, strict=True)
        ]


def _flat(masks: Tensor) -> Tensor:
    """``[samples, length, length, ...]`` with one dimension behind."""
    return masks.flatten(3) if masks.ndim > 3 else masks.unsqueeze(3)
