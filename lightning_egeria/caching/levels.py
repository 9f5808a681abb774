"""One cached boundary of a network: batches of its activations in and out of a store, and in memory while they fit."""

from __future__ import annotations

import dataclasses
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_egeria.caching.sizes import Lengths
from lightning_egeria.stores.rows import RowForm
from lightning_egeria.stores.store import ActivationStore

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
STAMP_BYTES = 8
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
        self._ragged = form.ragged
        self._place = np.full(entries if self.capacity else 0, -1, np.int32)
        # Memory of the host is taken page by page as it is written.
        self._rows = torch.empty((self.capacity, *form.stored_shape), dtype=form.stored_dtype, device=device)
        self._used = 0
        self._putting = threading.Lock()  # entries come from the reading and from the writing thread

    def holds(self, entries: Rows) -> Flags:
        """Which entries are here."""
        return self._place[entries] >= 0 if self.capacity else np.zeros(len(entries), bool)

    def take(self, entries: Rows, length: int) -> Tensor:
        """Rows that are here, in memory order, and of a length if the form is ragged."""
        places = self._place[entries].astype(np.int64)
        return chosen(self._rows, places, length if self._ragged else None)

    def put(self, entries: Rows, rows: Tensor) -> None:
        """Keep as many rows as still fit; longer ones in the place of those that are here."""
        if not self.capacity or (self._used == self.capacity and not self._ragged):
            return
        with self._putting:
            if self._ragged:  # a reader finds the values of before in what it reads of a row
                self._copy(self._place[entries[self.holds(entries)]], rows, np.flatnonzero(self.holds(entries)))
            new = np.flatnonzero(~self.holds(entries))[: self.capacity - self._used]
            places = np.arange(self._used, self._used + len(new))
            self._copy(places, rows, new)
            # Last: whoever finds a place finds its row.
            self._place[entries[new]] = places
            self._used += len(new)

    def _copy(self, places: npt.NDArray[Any], rows: Tensor, numbers: Rows) -> None:
        if not len(places):
            return
        kept = rows if len(numbers) == len(rows) else chosen(rows, numbers)
        if self._rows.device.type != "cpu":
            into = self._rows[:, : rows.shape[1]] if self._ragged else self._rows
            into[torch.from_numpy(places.astype(np.int64)).to(into.device)] = kept.to(into.device)
        else:
            raw = _as_bytes(kept)
            _as_bytes(self._rows)[places, : raw.shape[1]] = raw

    def drop(self, number: int) -> None:
        """Keep an entry no longer; its memory is not used again."""
        if self.capacity:
            self._place[number] = -1

    @property
    def index_bytes(self) -> int:
        """Memory for knowing where the rows are."""
        return self._place.nbytes


class Found(NamedTuple):
    """Rows that were read.

    Attributes:
        rows: the sound ones, in memory order.
        sound: which those are, ``[entries]``.
        stamps: of all entries, ``[entries, 2]``.
        lengths: of all rows in their first dimension, ``[entries]``; what is behind has no meaning. 1 if the form is
            not ragged.
    """

    rows: Tensor
    sound: Flags
    stamps: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int32]


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
        lengths: of the rows of a ragged form, ``[entries]``; 0 where it is not known.
        padded: whether entries of a ragged form serve batches of other lengths.
        doubts: as in `LevelSet`.
    """

    depth: int
    key: int
    form: RowForm
    store: ActivationStore
    host: MemoryTier
    device: MemoryTier
    stamps: npt.NDArray[np.uint64]
    verified: Flags
    lengths: npt.NDArray[np.int32]
    padded: Lengths = dataclasses.field(default_factory=Lengths)
    doubts: int = 0

    def verify(self, entry: int, doubts: int) -> None:
        """An entry was compared with its sample, which was planned when there had been so many doubts."""
        if doubts == self.doubts:  # else the sample may have been loaded before it changed
            self.verified[entry] = True

    def present(self, entries: Rows) -> Flags:
        """Which entries are there, as far as the index says."""
        found: Flags = self.store.index[entries] != 0
        return found

    def wants(self, entries: Rows, length: int) -> Flags:
        """Which entries are not there, or shorter."""
        return ~self.present(entries) | (self.form.ragged & (self.lengths[entries] < length))

    def forget(self, entries: Rows) -> None:
        """Make misses of entries."""
        for number in entries.tolist():
            self.store.forget(number)
            self.host.drop(number)
            self.device.drop(number)
        self.verified[entries] = False
        self.lengths[entries] = 0

    def release_memory(self) -> None:
        """Keep rows on disk only."""
        cpu = torch.device("cpu")
        self.host = MemoryTier(0, self.form, 0, cpu)
        self.device = MemoryTier(0, self.form, 0, cpu)

    def read(self, entries: Rows, pin: bool) -> Found:
        """Read rows."""
        host, form = self.host, self.form  # the first may be released meanwhile
        sound, held = np.ones(len(entries), bool), host.holds(entries)
        # Before the rows: they may become longer meanwhile.
        lengths = self.lengths[entries] if form.ragged else np.ones(len(entries), np.int32)
        longest = int(lengths.max(initial=1)) if held.all() and lengths.all() else form.length
        if held.all() and not pin:
            return Found(host.take(entries, longest), sound, self.stamps[entries], lengths)
        data = _room((len(entries), *form.of_length(longest)), form.stored_dtype, pin)
        raw = _as_bytes(data)
        if held.any():
            raw[held] = _as_bytes(host.take(entries[held], longest))
        for place in np.flatnonzero(~held):
            number = int(entries[place])
            shape = self._read_one(number, raw[place])
            if shape is None or shape != (form.of_length(shape[0]) if form.ragged and shape else form.stored_shape):
                sound[place] = False
                self.forget(entries[place : place + 1])
            elif form.ragged:
                lengths[place] = self.lengths[number] = shape[0]
        new = np.flatnonzero(~held & sound)
        for length in np.unique(lengths[new]).tolist():
            same = new[lengths[new] == length]
            host.put(entries[same], chosen(data, same, length if form.ragged else None))
        rows = data if sound.all() else chosen(data, np.flatnonzero(sound))
        return Found(rows, sound, self.stamps[entries], lengths)

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
        """Write rows, in memory order, that are not there yet or shorter; returns how many those were.

        Raises:
            OSError: the disk is full, say.
        """
        done = []
        for place, raw in enumerate(_as_bytes(rows)):
            if not self.wants(entries[place : place + 1], rows.shape[1] if self.form.ragged else 1).all():
                continue
            self.stamps[entries[place]] = stamps_of(fields[place])
            self.verified[entries[place]] = True
            if self.store.write(int(entries[place]), raw, tuple(rows.shape[1:]), fields[place]) > 0:
                done.append(place)
        self.host.put(entries[done], rows if len(done) == len(rows) else chosen(rows, np.array(done, np.int64)))
        if self.form.ragged:
            self.lengths[entries[done]] = rows.shape[1]
        return len(done)


def stamps_of(fields: bytes) -> tuple[int, int]:
    """Return the stamps of an entry: digests of the sample's fields, and of what the program made of its own.

    Args:
        fields: as in the store: 8 bytes of the second stamp, then the fields of the sample.
    """
    return xxhash.xxh3_64_intdigest(fields[STAMP_BYTES:]), int.from_bytes(fields[:STAMP_BYTES], "little")


def chosen(rows: Tensor, places: Rows, length: int | None = None) -> Tensor:
    """Some rows of a contiguous tensor, cut to a length; in the memory of the host, copied by the calling thread alone.

    torch would start further threads for every thread that asks it, which take the cores from those of the training.
    """
    if rows.device.type != "cpu":
        some = rows[torch.from_numpy(places).to(rows.device)]
        return some if length is None else some[:, :length].contiguous()
    shape = rows.shape[1:] if length is None else (length, *rows.shape[2:])
    found = _room((len(places), *shape), rows.dtype)
    if found.numel():
        into = _as_bytes(found)
        # With "raise", numpy would copy twice.
        np.take(_as_bytes(rows)[:, : into.shape[1]], places, axis=0, out=into, mode="clip")
    return found


def _room(shape: Sequence[int], dtype: torch.dtype, pin: bool = False) -> Tensor:
    """Return a tensor of any values, whose memory goes back to the system with it.

    Other memory of a thread stays with its process, so that each reading thread would keep its largest batches.
    """
    size = math.prod(shape) * dtype.itemsize
    if pin or size < MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)


def _as_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of contiguous rows, ``[rows, bytes]``."""
    if not rows.numel():
        return np.empty((rows.shape[0], 0), np.uint8)
    flat: npt.NDArray[Any] = rows.reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    return flat
