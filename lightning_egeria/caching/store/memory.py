"""Entries in memory, and rows that are copied there without the threads of torch."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.store.rows import Flags, RowForm, Rows

MAPPED_BYTES = 2**18


class MemoryTier:
    """The first entries that were put in, on one device, while they fit.

    Args:
        capacity_bytes: of all rows together.
        form: of the rows.
        entries: how many entries the store has.
        device: where to keep them.

    Attributes:
        capacity: how many rows fit.
    """

    def __init__(self, capacity_bytes: int, form: RowForm, entries: int, device: torch.device) -> None:
        self.capacity = min(capacity_bytes // max(1, form.row_bytes), entries)
        self._place = np.full(entries if self.capacity else 0, -1, np.int32)
        # Memory of the host is taken page by page as it is written.
        self._rows = torch.empty((self.capacity, *form.stored_shape), dtype=form.stored_dtype, device=device)
        self._used = 0
        self._putting = threading.Lock()  # entries come from the reading and from the writing thread

    def holds(self, entries: Rows) -> Flags:
        """Which entries are here."""
        return self._place[entries] >= 0 if self.capacity else np.zeros(len(entries), bool)

    def take(self, entries: Rows) -> Tensor:
        """Rows that are here, in memory order."""
        return chosen(self._rows, self._place[entries].astype(np.int64))

    def put(self, entries: Rows, rows: Tensor) -> None:
        """Keep as many rows as still fit."""
        if not self.capacity or self._used == self.capacity:
            return
        with self._putting:
            new = np.flatnonzero(~self.holds(entries))[: self.capacity - self._used]
            places = np.arange(self._used, self._used + len(new))
            self._copy(places, rows, new)
            # Last: where there is a place, there is its row.
            self._place[entries[new]] = places
            self._used += len(new)

    def _copy(self, places: npt.NDArray[Any], rows: Tensor, numbers: Rows) -> None:
        if not len(places):
            return
        kept = rows if len(numbers) == len(rows) else chosen(rows, numbers)
        if self._rows.device.type != "cpu":
            self._rows[torch.from_numpy(places.astype(np.int64)).to(self._rows.device)] = kept.to(self._rows.device)
        else:
            as_bytes(self._rows)[places] = as_bytes(kept)

    def drop(self, number: int) -> None:
        """Keep an entry no longer; its memory is not used again."""
        if self.capacity:
            self._place[number] = -1


def chosen(rows: Tensor, places: Rows) -> Tensor:
    """Some rows of a contiguous tensor; in the memory of the host, copied by the calling thread alone.

    torch would start further threads for every thread that asks it, which take the cores from those of the training.
    """
    if rows.device.type != "cpu":
        return rows[torch.from_numpy(places).to(rows.device)]
    found = room_for((len(places), *rows.shape[1:]), rows.dtype)
    if found.numel():  # with mode "raise", numpy would copy twice
        np.take(as_bytes(rows), places, axis=0, out=as_bytes(found), mode="clip")
    return found


def room_for(shape: Sequence[int], dtype: torch.dtype, pin: bool = False) -> Tensor:
    """Return a tensor of any values, whose memory goes back to the system with it.

    Other memory of a thread stays with its process, so that each reading thread would keep its largest batches.
    """
    size = math.prod(shape) * dtype.itemsize
    if pin or size < MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)


def as_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of contiguous rows, ``[rows, bytes]``."""
    if not rows.numel():
        return np.empty((rows.shape[0], 0), np.uint8)
    flat: npt.NDArray[Any] = rows.reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    return flat
