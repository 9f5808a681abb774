"""One cached boundary of a network: batches of its activations in and out of a store, and in memory while they fit."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_egeria.caching.store import ActivationStore

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
STAMP_BYTES = 8


@dataclasses.dataclass(frozen=True)
class RowForm:
    """What a batch of activations looks like in memory, so that it can be put back bit for bit, strides included.

    Attributes:
        shape: of a row, which is the activation of one sample, in memory order.
        order: dimensions of the batch from the slowest to the fastest in memory.
        dtype: of the values.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, batch: Tensor) -> RowForm:
        """The form of ``batch``: ``[samples, ...]``.

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

    @functools.cached_property
    def batch_shape(self) -> tuple[int, ...]:
        """Of a row as the network gives it."""
        return tuple(self.from_memory(torch.empty((0, *self.shape), device="meta")).shape[1:])

    def to_memory(self, batch: Tensor) -> Tensor:
        """The rows of ``batch`` in memory order, contiguous; `from_memory` is the inverse."""
        return batch.permute(self.order).contiguous()

    def empty(self, samples: int, device: torch.device) -> Tensor:
        """Return a batch of any values."""
        return self.from_memory(torch.empty((samples, *self.shape), dtype=self.dtype, device=device))

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

    Attributes:
        capacity: how many rows fit.
    """

    def __init__(self, capacity_bytes: int, form: RowForm, entries: int, device: torch.device) -> None:
        self.capacity = min(capacity_bytes // max(1, form.row_bytes), entries)
        self._place = np.full(entries if self.capacity else 0, -1, np.int32)
        # Memory of the host is taken page by page as it is written.
        self._rows = torch.empty((self.capacity, *form.shape), dtype=form.dtype, device=device)
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
        if self._used == self.capacity:
            return
        with self._putting:
            new = np.flatnonzero(~self.holds(entries))[: self.capacity - self._used]
            if not len(new):
                return
            kept = rows if len(new) == len(rows) else chosen(rows, new)
            place = slice(self._used, self._used + len(new))
            if self._rows.device.type != "cpu":
                self._rows[place] = kept.to(self._rows.device)
            else:
                _as_bytes(self._rows)[place] = _as_bytes(kept)
            # Last: whoever finds a place finds its row.
            self._place[entries[new]] = np.arange(place.start, place.stop)
            self._used = place.stop

    def drop(self, number: int) -> None:
        """Keep an entry no longer; its memory is not used again."""
        if self.capacity:
            self._place[number] = -1

    @property
    def index_bytes(self) -> int:
        """Memory for knowing where the rows are."""
        return self._place.nbytes


@dataclasses.dataclass
class Level:
    """One cached boundary.

    Attributes:
        depth: depth of the boundary.
        key: number of the computation whose results the entries are.
        form: form of the rows.
        store: entries on disk.
        host: entries in the memory of the host.
        device: entries in the memory of the device that trains, if that is another.
        stamps: digests of what each entry was computed from, ``[entries, 2]``: of the sample, and of what the program
            made. Known once an entry was written or read.
        verified: whether this run has compared or written the entry, ``[entries]``.
    """

    depth: int
    key: int
    form: RowForm
    store: ActivationStore
    host: MemoryTier
    device: MemoryTier
    stamps: npt.NDArray[np.uint64]
    verified: Flags

    def present(self, entries: Rows) -> Flags:
        """Which entries are there, as far as the index says."""
        found: Flags = self.store.index[entries] != 0
        return found

    def forget(self, entries: Rows) -> None:
        """Make misses of entries."""
        for number in entries.tolist():
            self.store.forget(number)
            self.host.drop(number)
            self.device.drop(number)
        self.verified[entries] = False

    def release_memory(self) -> None:
        """Keep rows on disk only."""
        cpu = torch.device("cpu")
        self.host = MemoryTier(0, self.form, 0, cpu)
        self.device = MemoryTier(0, self.form, 0, cpu)

    def read(self, entries: Rows, pin: bool) -> tuple[Tensor, Flags, npt.NDArray[np.uint64]]:
        """Read rows; return the sound ones in memory order, which those are, ``[entries]``, and all stamps.

        The stamps are ``[entries, 2]``.
        """
        host = self.host  # which may be released meanwhile
        sound, held = np.ones(len(entries), bool), host.holds(entries)
        if held.all() and not pin:
            return host.take(entries), sound, self.stamps[entries]
        data = torch.empty((len(entries), *self.form.shape), dtype=self.form.dtype, pin_memory=pin)
        raw = _as_bytes(data)
        if held.any():
            raw[held] = _as_bytes(host.take(entries[held]))
        for place in np.flatnonzero(~held):
            number = int(entries[place])
            if self._read_one(number, raw[place]) != self.form.shape:
                sound[place] = False
                self.forget(entries[place : place + 1])
        new = np.flatnonzero(~held & sound)
        if len(new):
            host.put(entries[new], chosen(data, new))
        rows = data if sound.all() else chosen(data, np.flatnonzero(sound))
        return rows, sound, self.stamps[entries]

    def _read_one(self, number: int, into: npt.NDArray[np.uint8]) -> tuple[int, ...] | None:
        """Read the activation and the stamps of an entry; return the shape, None if it is not sound."""
        shape, fields = self.store.read_both(number, into) or (None, None)
        if shape is None or fields is None or len(fields) < STAMP_BYTES:
            return None
        stamps = stamps_of(fields)
        if self.verified[number] and stamps != tuple(self.stamps[number].tolist()):
            return None  # another run has written it for another sample
        self.stamps[number] = stamps
        return shape

    def write(self, entries: Rows, rows: Tensor, fields: tuple[bytes, ...]) -> int:
        """Write rows, in memory order, that are not there yet; returns how many those were.

        Raises:
            OSError: the disk is full, say.
        """
        done = []
        for place, raw in enumerate(_as_bytes(rows)):
            if self.store.index[entries[place]]:
                continue
            self.stamps[entries[place]] = stamps_of(fields[place])
            self.verified[entries[place]] = True
            if self.store.write(int(entries[place]), raw, self.form.shape, fields[place]) > 0:
                done.append(place)
        self.host.put(entries[done], rows if len(done) == len(rows) else chosen(rows, np.array(done, np.int64)))
        return len(done)


def stamps_of(fields: bytes) -> tuple[int, int]:
    """Return the stamps of an entry: digests of the sample's fields, and of what the program made of its own.

    Args:
        fields: as in the store: 8 bytes of the second stamp, then the fields of the sample.
    """
    return xxhash.xxh3_64_intdigest(fields[STAMP_BYTES:]), int.from_bytes(fields[:STAMP_BYTES], "little")


def chosen(rows: Tensor, places: Rows) -> Tensor:
    """Some rows of a contiguous tensor; in the memory of the host, copied by the calling thread alone.

    torch would start further threads for every thread that asks it, which take the cores from those of the training.
    """
    if rows.device.type != "cpu":
        return rows[torch.from_numpy(places).to(rows.device)]
    found = torch.empty((len(places), *rows.shape[1:]), dtype=rows.dtype)
    if found.numel():
        np.take(_as_bytes(rows), places, axis=0, out=_as_bytes(found), mode="clip")  # "raise" would copy twice
    return found


def _as_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of contiguous rows, ``[rows, bytes]``."""
    if not rows.numel():
        return np.empty((rows.shape[0], 0), np.uint8)
    flat: npt.NDArray[Any] = rows.reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    return flat
