"""One cached boundary of a network: batches of its activations in and out of a store, and in memory while they fit."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.store import ActivationStore

Rows = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class RowForm:
    """What a batch of activations looks like in memory, so that it can be put back bit for bit, strides included.

    Attributes:
        shape: of one row in memory order.
        order: dimensions of the batch from the slowest to the fastest in memory.
        dtype: of the values.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, batch: Tensor) -> RowForm:
        """The form of ``batch``, ``[samples, ...]``.

        >>> RowForm.of(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        RowForm(shape=(4, 5, 3), order=(0, 2, 3, 1), dtype=torch.float32)
        """
        strides = batch.stride()
        order = (0, *sorted(range(1, batch.ndim), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(batch.shape[dim] for dim in order[1:]), order, batch.dtype)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_memory(self, batch: Tensor) -> Tensor:
        """A view of ``batch`` with the dimensions in the order of memory; `from_memory` is the inverse."""
        return batch.permute(self.order)

    def from_memory(self, rows: Tensor) -> Tensor:
        """A batch with the strides of the original."""
        inverse = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
        return rows.permute(inverse)


class MemoryTier:
    """The first entries that were put in, on one device, while they fit.

    Args:
        capacity_bytes: of all rows together.
        form: of the rows.
        entries: how many entries the store has.
        device: where to keep them.
    """

    def __init__(self, capacity_bytes: int, form: RowForm, entries: int, device: torch.device) -> None:
        self.capacity = min(entries, capacity_bytes // max(1, form.row_bytes))
        self._place = np.full(entries if self.capacity else 0, -1, np.int32)
        # Memory of the host is taken page by page as it is written.
        self._rows = torch.empty((self.capacity, *form.shape), dtype=form.dtype, device=device)
        self._used = 0
        self._putting = threading.Lock()  # entries come from the reading and from the writing thread

    def places(self, entries: Rows) -> Rows:
        """Where each entry is; -1: not here."""
        return self._place[entries].astype(np.int64) if self.capacity else np.full(len(entries), -1)

    def take(self, places: Rows) -> Tensor:
        """The rows at ``places``, in memory order, ``[len(places), ...]``."""
        return self._rows[torch.from_numpy(places).to(self._rows.device)]

    def copy_into(self, places: Rows, into: Tensor, at: Rows) -> None:
        """Copy the rows at ``places`` to the rows ``at`` of ``into``."""
        into[torch.from_numpy(at)] = self._rows[torch.from_numpy(places)]

    def put(self, entries: Rows, rows: Tensor) -> None:
        """Keep as many rows as still fit."""
        if self._used == self.capacity:
            return
        with self._putting:
            new = np.flatnonzero(self.places(entries) < 0)[: self.capacity - self._used]
            places = np.arange(self._used, self._used + len(new))
            self._rows[torch.from_numpy(places)] = rows[torch.from_numpy(new)].to(self._rows.device)
            self._place[entries[new]] = places  # last: whoever finds a place finds its row
            self._used += len(new)


@dataclasses.dataclass
class Level:
    """One boundary that is cached.

    Attributes:
        cut: depth of the boundary.
        form: of its activations.
        store: on disk.
        host: in the memory of the host.
        device: in the memory of the device that trains, if that is another.
    """

    cut: int
    form: RowForm
    store: ActivationStore
    host: MemoryTier
    device: MemoryTier

    def present(self, entries: Rows) -> npt.NDArray[np.bool_]:
        """Which entries are there, as far as the index says."""
        found: npt.NDArray[np.bool_] = self.store.index[entries] != 0
        return found

    def read(self, entries: Rows, pin: bool) -> tuple[Tensor, npt.NDArray[np.bool_]]:
        """Rows in memory order, ``[len(entries), ...]``, and which of them are sound."""
        rows = torch.empty((len(entries), *self.form.shape), dtype=self.form.dtype, pin_memory=pin)
        sound = np.ones(len(entries), bool)
        places = self.host.places(entries)
        held = np.flatnonzero(places >= 0)
        if len(held):
            self.host.copy_into(places[held], rows, held)
        raw = _as_bytes(rows)
        missing = np.flatnonzero(places < 0)
        for place in missing:
            number = int(entries[place])
            if self.store.read(number, raw[place]) != self.form.shape:
                sound[place] = False
                self.store.forget(number)
        kept = missing[sound[missing]]
        if len(kept):
            self.host.put(entries[kept], rows[torch.from_numpy(kept)])
        return rows, sound

    def write(self, entries: Rows, rows: Tensor, fields: tuple[bytes, ...]) -> int:
        """Write rows in memory order, ``[len(entries), ...]``; returns how many there are now.

        Raises:
            OSError: the disk is full, say.
        """
        raw = _as_bytes(rows)
        done = [
            self.store.write(int(number), raw[place], self.form.shape, fields[place]) > 0
            for place, number in enumerate(entries)
        ]
        self.host.put(entries[done], rows[torch.tensor(done)])
        return sum(done)


def _as_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of contiguous rows, ``[rows, bytes]``."""
    if not rows.numel():
        return np.empty((rows.shape[0], 0), np.uint8)
    flat: npt.NDArray[Any] = rows.reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    return flat
