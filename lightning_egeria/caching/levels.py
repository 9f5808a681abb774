"""One cached boundary of a network: its entries on disk and in memory, and new ones as long as there is room."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.stores.background import WriteBehind
from lightning_egeria.stores.limits import Limits
from lightning_egeria.stores.memory import MemoryTier, as_bytes, chosen, room_for
from lightning_egeria.stores.rows import Flags, RowForm, Rows
from lightning_egeria.stores.samples import STAMP_BYTES, stamps_of
from lightning_egeria.stores.store import ActivationStore

JUDGED_LENGTHS = 4  # of texts; each text is compared at two lengths besides, before it becomes an entry


class Lengths:
    """Whether a text's output is the same however far it is padded, as far as batches of some lengths have told.

    Args:
        version: `Outside.version` of these batches.

    Attributes:
        agree: whether it is, to rounding; None if nobody knows yet.
        exact: whether all bits were the same so far.
        version: as given.

    >>> lengths = Lengths()
    >>> lengths.serves(np.array([50, 40, 30]), 40).tolist()
    [False, True, False]
    >>> lengths.judged(50, same=True, exact=True)
    >>> lengths.serves(np.array([50, 40, 30]), 40).tolist()
    [True, True, False]
    """

    def __init__(self, version: int = 0) -> None:
        self.agree: bool | None = None
        self.exact = True
        self.version = version
        self._judged: set[int] = set()

    def is_new(self, length: int) -> bool:
        """Whether a batch of a length may tell more. Of those that are not the longest, the first ones are enough."""
        if self.agree is False or length in self._judged:
            return False
        return len(self._judged) < JUDGED_LENGTHS or length > max(self._judged)

    def judged(self, length: int, same: bool, exact: bool) -> None:
        """A batch of a length has told whether shorter or longer ones have the same output, and the same bits."""
        self._judged.add(length)
        self.exact = self.exact and exact
        self.agree = same and self.agree is not False

    def serves(self, own: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.bool_]:
        """Return which entries, of these lengths, may be used in a batch of another length."""
        found: npt.NDArray[np.bool_] = own >= length if self.agree else own == length
        return found


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
        returned: number of samples that were loaded again and were those of their entries.
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
    returned: int = 0

    def verify(self, entry: int, doubts: int) -> None:
        """An entry was compared with its sample, which was planned when there had been so many doubts."""
        self.returned += 1
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
        data = room_for((len(entries), *form.of_length(longest)), form.stored_dtype, pin)
        raw = as_bytes(data)
        if held.any():
            raw[held] = as_bytes(host.take(entries[held], longest))
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
        for place, raw in enumerate(as_bytes(rows)):
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


class Written(Protocol):
    """What is counted; see `CacheStats`."""

    to_write: int
    written: int


class Recording:
    """Writes entries in the background; ends where there is no room, or no disk, for more.

    Args:
        limits: limits of room.
        stats: counts written entries.
        warn: called with a text for the user and the name of its cause.

    Attributes:
        active: whether entries are still written.
    """

    def __init__(self, limits: Limits, stats: Written, warn: Callable[[str, str], None]) -> None:
        self.active = True
        self._limits = limits
        self._stats = stats
        self._warn = warn
        self._writer = WriteBehind()
        self._error: str | None = None
        self._others = 0

    def restart(self, others: int) -> None:
        """A new level is there, and stores of other runs take ``others`` bytes."""
        self.active, self._error, self._others = True, None, others

    def write(
        self,
        levels: Sequence[Level],
        entries: Rows,
        activation: Tensor,
        fields: Sequence[bytes | None],
        lazy: Sequence[bool],
        made: npt.NDArray[np.uint64],
    ) -> None:
        """Write the rows of a batch that have no entry in the newest level, or a shorter one.

        Args:
            levels: the levels, the newest last.
            entries: numbers of the entries, ``[samples]``.
            activation: at the newest level's boundary, ``[samples, ...]``.
            fields: encoded fields of each sample; None for one that was not loaded, or cannot be encoded.
            lazy: whether each sample was not loaded; its fields are those of its entry in an older level.
            made: digest of what the program made of each sample, ``[samples]``.
        """
        level = levels[-1]
        if self._error is not None:
            self._end("the disk", self._error, level)
        if not self.active or not level.form.fits(activation):
            return
        new = level.wants(entries, activation.shape[1] if level.form.ragged else 1)
        new &= np.array([one is not None or late for one, late in zip(fields, lazy, strict=True)], bool)
        if not new.any():
            return
        places = np.flatnonzero(new).tolist()
        rows = level.form.to_memory(activation[torch.from_numpy(new).to(activation.device)])
        if level.device.capacity:
            level.device.put(entries[new], rows)
        encoded = [fields[place] for place in places]
        size = rows.nbytes + sum(len(one) for one in encoded if one is not None)
        if self._has_room(levels, size):
            self._stats.to_write += len(places)
            host, older = rows.cpu(), tuple(reversed(levels[:-1]))
            self._writer.submit(lambda: self._write(level, older, entries[new], host, encoded, made[new]), size)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.finish()

    def close(self) -> None:
        """Write what is waiting, and nothing after it. Safe to call twice."""
        self.active = False
        self._writer.close()

    def _write(
        self,
        level: Level,
        older: Sequence[Level],
        entries: Rows,
        rows: Tensor,
        fields: list[bytes | None],
        made: npt.NDArray[np.uint64],
    ) -> None:
        for at, one in enumerate(fields):
            fields[at] = one if one is not None else _fields_in(older, int(entries[at]))
        kept = np.flatnonzero([one is not None for one in fields])
        if len(kept) < len(entries):
            entries, rows, made = entries[kept], chosen(rows, kept), made[kept]
        heads = [int(one).to_bytes(STAMP_BYTES, "little") for one in made]
        try:
            found = [one for one in fields if one is not None]
            whole = tuple(head + one for head, one in zip(heads, found, strict=True))
            self._stats.written += level.write(entries, rows, whole)
        except OSError as error:
            self._error = f"writing to {level.store.folder} failed: {error.strerror or error}"

    def _has_room(self, levels: Sequence[Level], size: int) -> bool:
        level, limits = levels[-1], self._limits
        try:
            free = shutil.disk_usage(level.store.folder).free
        except OSError:
            free = 0
        if not level.store.exists:
            self._end("the folder", f"{level.store.folder} is gone", level)
        elif self._others + bytes_on_disk(levels) + size > limits.max_bytes:
            self._end("max_bytes", f"max_bytes={limits.max_bytes} is reached", level)
        elif free - size < limits.min_free_bytes:
            reason = f"less than min_free_bytes={limits.min_free_bytes} would be left on the disk"
            self._end("min_free_bytes", reason, level)
        return self.active

    def _end(self, cause: str, reason: str, level: Level) -> None:
        if self.active:
            self.active = False
            count = int(np.count_nonzero(level.store.index))
            self._warn(
                f"no more outputs of frozen layers are written: {reason}. {count} of {len(level.store.index)} entries "
                "stay in use; all other samples run the frozen layers",
                cause,
            )


def _fields_in(levels: Sequence[Level], number: int) -> bytes | None:
    """Encoded fields of a sample from the entry of a level."""
    for level in levels:
        fields = level.store.read_fields(number)
        if fields is not None:
            return fields[STAMP_BYTES:]
    return None


def bytes_on_disk(levels: Sequence[Level]) -> int:
    """Return the bytes that the stores take now."""
    with contextlib.suppress(OSError):
        return sum(level.store.disk_bytes for level in levels)
    return 0
