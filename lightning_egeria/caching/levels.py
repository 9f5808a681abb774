"""One cached boundary of a network: batches of its activations in and out of a store, and in memory while they fit."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
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

    A row, which is the activation of one sample, is one piece; where samples differ in length it is one piece for each
    position.

    Attributes:
        piece: shape of a piece in memory order.
        ragged: whether a row has as many pieces as its sample has positions.
        order: dimensions of the batch from the slowest to the fastest in memory.
        dtype: of the values.
    """

    piece: tuple[int, ...]
    ragged: bool
    order: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, batch: Tensor, ragged: bool = False) -> RowForm:
        """The form of ``batch``: ``[samples, ...]``, or ``[samples, positions, ...]`` if it is ragged.

        >>> RowForm.of(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        RowForm(piece=(4, 5, 3), ragged=False, order=(0, 2, 3, 1), dtype=torch.float32)
        >>> RowForm.of(torch.rand(2, 7, 5), ragged=True).piece
        (5,)
        """
        strides, first = batch.stride(), 2 if ragged else 1
        order = (*range(first), *sorted(range(first, batch.ndim), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(batch.shape[dim] for dim in order[first:]), ragged, order, batch.dtype)

    @property
    def piece_bytes(self) -> int:
        """Of one piece."""
        return math.prod(self.piece) * self.dtype.itemsize

    def to_memory(self, batch: Tensor) -> Tensor:
        """A view of ``batch`` with the dimensions in the order of memory; `from_memory` is the inverse."""
        return batch.permute(self.order)

    def empty(self, samples: int, device: torch.device) -> Tensor:
        """Return a batch of any values, with rows of fixed size."""
        return self.from_memory(torch.empty((samples, *self.piece), dtype=self.dtype, device=device))

    def from_memory(self, rows: Tensor) -> Tensor:
        """A batch with the strides of the original."""
        inverse = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
        return rows.permute(inverse)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Some rows, one behind the other.

    Attributes:
        data: in memory order, ``[pieces, ...]``.
        lengths: pieces of each row, ``[rows]``; None: one each.
    """

    data: Tensor
    lengths: Rows | None

    def rows(self) -> list[Tensor]:
        """Each row in memory order."""
        if self.lengths is None:
            return list(self.data)
        return list(self.data.split(self.lengths.tolist()))

    def select(self, kept: Flags) -> Pieces:
        """Some of the rows, not copied if it is all of them."""
        if kept.all():
            return self
        if self.lengths is None:
            return Pieces(_chosen(self.data, np.flatnonzero(kept)), None)
        places = np.flatnonzero(np.repeat(kept, self.lengths))
        return Pieces(_chosen(self.data, places), self.lengths[kept])

    def batch(self, form: RowForm, length: int | None, device: torch.device) -> Tensor:
        """As the network gives it, ``[rows, ...]``: with zeros behind the end of each sample, up to ``length``."""
        data = self.data.to(device, non_blocking=True)
        if self.lengths is None:
            return form.from_memory(data)
        if length is None or (self.lengths > length).any():
            raise ValueError("a row is longer than its batch")
        whole = torch.zeros((len(self.lengths) * length, *form.piece), dtype=form.dtype, device=device)
        starts = np.arange(len(self.lengths)) * length
        whole[torch.from_numpy(ranges(starts, self.lengths)).to(device)] = data
        return form.from_memory(whole.view(len(self.lengths), length, *form.piece))


def pieces_of(form: RowForm, batch: Tensor, lengths: Sequence[int] | None) -> Pieces:
    """The rows of a batch of activations; where they are ragged, without what is behind the end of each sample."""
    rows = form.to_memory(batch)
    if not form.ragged:
        return Pieces(rows.contiguous(), None)
    if lengths is None:
        raise RuntimeError("ragged rows need the lengths of their samples")
    cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return Pieces(torch.cat(cut), np.asarray(lengths, np.int64))


def ranges(starts: Rows, lengths: Rows) -> Rows:
    """All numbers of several ranges.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


class MemoryTier:
    """The first entries that were put in, on one device, while they fit.

    Args:
        capacity_bytes: of all rows together.
        form: of the rows.
        entries: how many entries the store has.
        device: where to keep them.
    """

    def __init__(self, capacity_bytes: int, form: RowForm, entries: int, device: torch.device) -> None:
        pieces = capacity_bytes // max(1, form.piece_bytes)
        self._capacity = min(pieces, 2**31 - 1) if form.ragged else min(pieces, entries)
        kept = entries if self._capacity else 0
        self._place = np.full(kept, -1, np.int32)
        self._length = np.zeros(kept, np.int32) if form.ragged else None
        # Memory of the host is taken page by page as it is written.
        self._pieces = torch.empty((self._capacity, *form.piece), dtype=form.dtype, device=device)
        self._used = 0
        self._putting = threading.Lock()  # entries come from the reading and from the writing thread

    def holds(self, entries: Rows) -> Flags:
        """Which entries are here."""
        return self._place[entries] >= 0 if self._capacity else np.zeros(len(entries), bool)

    def take(self, entries: Rows) -> Pieces:
        """Rows that are here."""
        starts = self._place[entries].astype(np.int64)
        if self._length is None:
            return Pieces(_chosen(self._pieces, starts), None)
        lengths = self._length[entries].astype(np.int64)
        return Pieces(_chosen(self._pieces, ranges(starts, lengths)), lengths)

    def put(self, entries: Rows, rows: Pieces) -> None:
        """Keep as many rows as still fit."""
        if self._used == self._capacity:
            return
        with self._putting:
            lengths = rows.lengths if rows.lengths is not None else np.ones(len(entries), np.int64)
            new = ~self.holds(entries)
            new &= np.cumsum(lengths * new) <= self._capacity - self._used
            if not new.any():
                return
            count = int(lengths[new].sum())
            kept = rows.select(new)
            place = slice(self._used, self._used + count)
            if self._pieces.device.type != "cpu":
                self._pieces[place] = kept.data.to(self._pieces.device)
            elif count:
                _as_bytes(self._pieces)[place] = _as_bytes(kept.data)
            if self._length is not None:
                self._length[entries[new]] = lengths[new]
            # Last: whoever finds a place finds its row.
            self._place[entries[new]] = self._used + np.cumsum(lengths[new]) - lengths[new]
            self._used += count

    def drop(self, number: int) -> None:
        """Keep an entry no longer; its memory is not used again."""
        if self._capacity:
            self._place[number] = -1

    @property
    def capacity(self) -> int:
        """How many pieces fit."""
        return self._capacity

    @property
    def index_bytes(self) -> int:
        """Memory for knowing where the rows are."""
        return self._place.nbytes + (self._length.nbytes if self._length is not None else 0)


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

    def read(self, entries: Rows, pin: bool) -> tuple[Pieces, Flags, npt.NDArray[np.uint64]]:
        """Read rows; return the sound ones, which those are, ``[entries]``, and their stamps, ``[entries, 2]``."""
        pieces, sound = self._read_ragged(entries, pin) if self.form.ragged else self._read_fixed(entries, pin)
        return pieces, sound, self.stamps[entries]

    def _read_fixed(self, entries: Rows, pin: bool) -> tuple[Pieces, Flags]:
        host = self.host  # which may be released meanwhile
        sound, held = np.ones(len(entries), bool), host.holds(entries)
        if held.all() and not pin:
            return host.take(entries), sound
        data = torch.empty((len(entries), *self.form.piece), dtype=self.form.dtype, pin_memory=pin)
        raw = _as_bytes(data)
        if held.any():
            raw[held] = _as_bytes(host.take(entries[held]).data)
        for place in np.flatnonzero(~held):
            number = int(entries[place])
            if self._read_one(number, raw[place]) != self.form.piece:
                sound[place] = False
                self.forget(entries[place : place + 1])
        rows = Pieces(data, None)
        new = ~held & sound
        if new.any():
            host.put(entries[new], rows.select(new))
        return rows.select(sound), sound

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

    def _read_ragged(self, entries: Rows, pin: bool) -> tuple[Pieces, Flags]:
        host = self.host  # which may be released meanwhile
        parts: list[Tensor] = []
        sound = np.ones(len(entries), bool)
        held = host.holds(entries)
        taken = host.take(entries[held]) if held.any() else None
        known = iter(taken.rows() if taken is not None else ())
        buffer = self.store.buffer()
        for place, number in enumerate(entries.tolist()):
            if held[place]:
                parts.append(next(known))
                continue
            shape = self._read_one(number, buffer)
            if shape is None or shape[1:] != self.form.piece:
                sound[place] = False
                self.forget(entries[place : place + 1])
                continue
            row = torch.empty(shape, dtype=self.form.dtype)
            _as_bytes(row.unsqueeze(0))[0] = buffer[: shape[0] * self.form.piece_bytes]
            parts.append(row)
        data = torch.empty((sum(len(p) for p in parts), *self.form.piece), dtype=self.form.dtype, pin_memory=pin)
        if data.numel():
            np.concatenate([_as_bytes(part) for part in parts if len(part)], out=_as_bytes(data))
        lengths = np.array([len(part) for part in parts], np.int64)
        rows = Pieces(data, lengths)
        new = ~held & sound
        if new.any():
            host.put(entries[new], rows.select(new[sound]))
        return rows, sound

    def write(self, entries: Rows, rows: Pieces, fields: tuple[bytes, ...]) -> int:
        """Write rows that are not there yet; returns how many those were.

        Raises:
            OSError: the disk is full, say.
        """
        done = np.zeros(len(entries), bool)
        for place, row in enumerate(rows.rows()):
            if self.store.index[entries[place]]:
                continue
            raw = _as_bytes(row.unsqueeze(0))[0]
            self.stamps[entries[place]] = stamps_of(fields[place])
            self.verified[entries[place]] = True
            done[place] = self.store.write(int(entries[place]), raw, tuple(row.shape), fields[place]) > 0
        self.host.put(entries[done], rows.select(done))
        return int(done.sum())


def stamps_of(fields: bytes) -> tuple[int, int]:
    """Return the stamps of an entry: digests of the sample's fields, and of what the program made of its own.

    Args:
        fields: as in the store: 8 bytes of the second stamp, then the fields of the sample.
    """
    return xxhash.xxh3_64_intdigest(fields[STAMP_BYTES:]), int.from_bytes(fields[:STAMP_BYTES], "little")


def _chosen(rows: Tensor, places: Rows) -> Tensor:
    """Some rows of a contiguous tensor; in the memory of the host, copied by the calling thread alone.

    torch would start further threads for every thread that asks it, which take the cores from those of the training.
    """
    if rows.device.type != "cpu":
        return rows[torch.from_numpy(places).to(rows.device)]
    chosen = torch.empty((len(places), *rows.shape[1:]), dtype=rows.dtype)
    if chosen.numel():
        np.take(_as_bytes(rows), places, axis=0, out=_as_bytes(chosen), mode="clip")  # "raise" would copy twice
    return chosen


def _as_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of contiguous rows, ``[rows, bytes]``."""
    if not rows.numel():
        return np.empty((rows.shape[0], 0), np.uint8)
    flat: npt.NDArray[Any] = rows.reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    return flat
