"""Cached values of one loader: their entries on disk and in memory, from the opening of their stores to the removal.

The life of an entry, which is one sample's row of a cached value:

*   *absent*: the sample is loaded and the frozen modules run. Their row is written in the background.
*   *verified*: this run has written the entry, or compared it with its loaded sample (`CachedValue.verified`). The
    sample is left out from then on.
*   *doubtful*: it is there, but an earlier run wrote it, or the dataset has changed since (`forget_verified`). The
    sample is loaded, and its digest decides: with the entry's stamps it is verified, with others it is a miss and
    written again.
*   *forgotten*: its checksum is wrong, or its sample is another one (`CachedValue.forget`). It is absent.

A plan is made some batches ahead, and a doubt may come up in between. `CachedValue.doubts` counts the doubts: a
comparison verifies an entry only if there was no doubt since its plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich import filesize
from torch import Tensor

from lightning_egeria.caching.stats import CacheStats, spending
from lightning_egeria.caching.store.background import ReadAhead, WriteBehind
from lightning_egeria.caching.store.directory import CacheDirectory
from lightning_egeria.caching.store.limits import Limits
from lightning_egeria.caching.store.manifest import FORMAT, Manifest
from lightning_egeria.caching.store.memory import MemoryTier, as_bytes, chosen, room_for
from lightning_egeria.caching.store.rows import Flags, RowForm, Rows
from lightning_egeria.caching.store.samples import STAMP_BYTES, stamps_of
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import CacheError, StoreError

AGREEING = 8  # rows in batches of another size with the bits of the entries, before it is used
COUNT_EVERY_S = 1.0
QUICK_BYTES = 2**20  # that are copied sooner than another thread begins


class Found(NamedTuple):
    """Rows that were read.

    Attributes:
        rows: the sound ones, in memory order.
        sound: which those are, ``[entries]``.
        stamps: of all entries, ``[entries, 2]``.
    """

    rows: Tensor
    sound: Flags
    stamps: npt.NDArray[np.uint64]


class BatchSizes:
    """Sizes of batches whose rows have the same bits as those that entries were computed in.

    Args:
        size: of the batch that the first entries are computed in.
        proven: whether its rows are known not to depend on one another.

    >>> sizes = BatchSizes(8)
    >>> sizes.verdict(8), sizes.verdict(5), sizes.compared(5, same=True), sizes.compared(5, same=True)
    (True, None, None, True)
    """

    def __init__(self, size: int, proven: bool = True) -> None:
        self._size = size
        self._verdicts: dict[int, bool] = {size: True} if proven else {}
        self._agreed: dict[int, int] = {}

    def verdict(self, size: int) -> bool | None:
        """Whether rows of this size have the same bits; None if that is not known yet."""
        return self._verdicts.get(size)

    def makes_entries(self, size: int) -> bool:
        """Whether rows of a batch of this size become entries."""
        return size == self._size or bool(self.verdict(size))

    def compared(self, size: int, same: bool) -> bool | None:
        """A batch of a size without verdict had the same bits as its entries, or not; return the verdict."""
        self._agreed[size] = self._agreed.get(size, 0) + size
        if not same or self._agreed[size] >= AGREEING:
            self._verdicts[size] = same
        return self._verdicts.get(size)


@dataclasses.dataclass
class CachedValue:
    """One cached value: an output that the program asked for, of all samples.

    Attributes:
        key: number of the computation.
        shape: of a row, as the network gives it.
        paths: of the frozen modules behind it.
        form: form of the rows.
        store: entries on disk.
        host: entries in the memory of the host.
        device: entries in the memory of the device that trains, if that is another.
        stamps: digests of what each entry was computed from, ``[entries, 2]``: of the sample, and of what the program
            made. Known once an entry was written or read.
        verified: whether this run has compared or written the entry, ``[entries]``.
        sizes: sizes of batches that entries may be used in.
        doubts: as in `CachedValues`.
        returned: number of samples that were loaded again and were those of their entries.
        asked: number of the epoch in which the program asked for it last.
        host_bytes: memory of the host that its entries may take.
        unmatched: batches in a row whose entries were all of other samples, or of what the program made of them.
        sizes_behind: shapes of what it follows from, by sample.
    """

    key: int
    shape: tuple[int, ...]
    paths: frozenset[str]
    form: RowForm
    store: ActivationStore
    host: MemoryTier
    device: MemoryTier
    stamps: npt.NDArray[np.uint64]
    verified: Flags
    sizes: BatchSizes
    doubts: int = 0
    returned: int = 0
    asked: int = 0
    host_bytes: int = 0
    unmatched: int = 0
    sizes_behind: frozenset[tuple[int, ...]] = frozenset()

    def verify(self, entry: int, doubts: int) -> None:
        """An entry was compared with its sample; ``doubts`` as of the plan of the batch."""
        self.returned += 1
        if doubts == self.doubts:  # else the sample may have been loaded before it changed
            self.verified[entry] = True

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

    def in_memory(self, entries: Rows, pin: bool) -> Found | None:
        """Return rows that are in memory and of few bytes, which the training thread reads; None for others."""
        sound = np.ones(len(entries), bool)
        if self.device.holds(entries).all():
            return Found(self.device.take(entries), sound, self.stamps[entries])
        if pin or len(entries) * self.form.row_bytes >= QUICK_BYTES or not self.host.holds(entries).all():
            return None
        return Found(self.host.take(entries), sound, self.stamps[entries])

    def read(self, entries: Rows, pin: bool) -> Found:
        """Read rows."""
        host, form = self.host, self.form  # the first may be released meanwhile
        sound, held = np.ones(len(entries), bool), host.holds(entries)
        if held.all() and not pin:
            return Found(host.take(entries), sound, self.stamps[entries])
        data = room_for((len(entries), *form.stored_shape), form.stored_dtype, pin)
        raw = as_bytes(data)
        if held.any():
            raw[held] = as_bytes(host.take(entries[held]))
        for place in np.flatnonzero(~held):
            if self._read_one(int(entries[place]), raw[place]) != form.stored_shape:
                sound[place] = False
                self.forget(entries[place : place + 1])
        new = np.flatnonzero(~held & sound)
        host.put(entries[new], chosen(data, new))
        return Found(data if sound.all() else chosen(data, np.flatnonzero(sound)), sound, self.stamps[entries])

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
        for place, raw in enumerate(as_bytes(rows)):
            if self.present(entries[place : place + 1]).all():
                continue
            self.stamps[entries[place]] = stamps_of(fields[place])
            self.verified[entries[place]] = True
            if self.store.write(int(entries[place]), raw, tuple(rows.shape[1:]), fields[place]) > 0:
                done.append(place)
        self.host.put(entries[done], rows if len(done) == len(rows) else chosen(rows, np.array(done, np.int64)))
        return len(done)


class Recording:
    """Writes entries in the background; ends where there is no room, or no disk, for more.

    Args:
        limits: limits of room.
        stats: counts written entries.
        warn: called with a text for the user and the name of its cause.

    Attributes:
        active: whether entries are still written.
    """

    def __init__(self, limits: Limits, stats: CacheStats, warn: Callable[[str, str], None]) -> None:
        self.active = True
        self._limits = limits
        self._stats = stats
        self._warn = warn
        self._writer = WriteBehind()
        self._error: str | None = None
        self._others = 0

    def restart(self, others: int) -> None:
        """A new value is cached, and stores of other runs take ``others`` bytes."""
        self.active, self._error, self._others = True, None, others

    def write(
        self,
        values: Sequence[CachedValue],
        value: CachedValue,
        entries: Rows,
        activation: Tensor,
        fields: Sequence[bytes | None],
        lazy: Sequence[bool],
        made: npt.NDArray[np.uint64],
    ) -> None:
        """Write the rows of a batch that have no entry.

        Args:
            values: all cached values.
            value: the one to write entries of.
            entries: numbers of the entries, ``[samples]``.
            activation: what was computed, ``[samples, ...]``.
            fields: encoded fields of each sample; None for one that was not loaded, or cannot be encoded.
            lazy: whether each sample was not loaded; its fields are those of its entry of another value.
            made: digest of what the program made of each sample, ``[samples]``.
        """
        if self._error is not None:
            self._end("the disk", self._error, value)
        if not self.active or not value.form.fits(activation):
            return
        new = ~value.present(entries)
        new &= np.array([one is not None or late for one, late in zip(fields, lazy, strict=True)], bool)
        if not new.any():
            return
        places = np.flatnonzero(new).tolist()
        rows = value.form.to_memory(activation[torch.from_numpy(new).to(activation.device)])
        if value.device.capacity:
            value.device.put(entries[new], rows)
        encoded = [fields[place] for place in places]
        size = rows.nbytes + sum(len(one) for one in encoded if one is not None)
        if self._has_room(values, value, size):
            self._stats.to_write += len(places)
            host, others = rows.cpu(), tuple(one for one in reversed(values) if one is not value)

            def job() -> None:
                with spending(self._stats, time.thread_time):
                    self._write(value, others, entries[new], host, encoded, made[new])

            self._writer.submit(job, size)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.finish()

    def close(self) -> None:
        """Write what is waiting, and nothing after it. Safe to call twice."""
        self.active = False
        self._writer.close()

    def _write(
        self,
        level: CachedValue,
        older: Sequence[CachedValue],
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

    def _has_room(self, levels: Sequence[CachedValue], level: CachedValue, size: int) -> bool:
        limits = self._limits
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

    def _end(self, cause: str, reason: str, level: CachedValue) -> None:
        if self.active:
            self.active = False
            count = int(np.count_nonzero(level.store.index))
            self._warn(
                f"no more outputs of frozen layers are written: {reason}. {count} of {len(level.store.index)} entries "
                "stay in use; all other samples run the frozen layers",
                cause,
            )


def _fields_in(levels: Sequence[CachedValue], number: int) -> bytes | None:
    """Encoded fields of a sample from the entry of a level."""
    for level in levels:
        fields = level.store.read_fields(number)
        if fields is not None:
            return fields[STAMP_BYTES:]
    return None


def bytes_on_disk(levels: Sequence[CachedValue]) -> int:
    """Return the bytes that the stores take now."""
    with contextlib.suppress(OSError):
        return sum(level.store.disk_bytes for level in levels)
    return 0


@dataclasses.dataclass(frozen=True)
class Origin:
    """What the entries of a value are computed from: two runs share a store only if all of it is the same.

    Attributes:
        loader: ``"training"`` or the name of a validation loader.
        data: class of the dataset.
        samples: number of its samples.
        structure: structure of a sample.
        views: variants of each sample.
        seed: seed of the views.
        run: text that no other run has, where entries are of use in one run only; else empty.
        computation: how frozen modules and the program make rows of samples.
        batch_size: size of the batch; rows of others may differ in their last bits.
        model: class of the model.
        paths: of the frozen modules behind the value, in the order of the network.
        weights: digest of their state.
        device: that computes it.
    """

    loader: str
    data: type
    samples: int
    structure: Any
    views: int
    seed: int
    run: str
    computation: str
    batch_size: int
    model: type
    paths: tuple[str, ...]
    weights: bytes
    device: torch.device

    @property
    def modules(self) -> str:
        """The frozen modules behind the value, in words."""
        paths = self.paths
        return ", ".join(map(repr, paths)) if len(paths) < 4 else f"{paths[0]!r} to {paths[-1]!r}"

    def manifest(self, form: RowForm, field_bytes: int) -> Manifest:
        """Return the manifest of a store for rows of a form, with room for ``field_bytes`` bytes of encoded fields."""
        about = {
            "model": self.model.__name__,
            "modules": self.modules,
            "data": self.data.__name__,
            "samples": str(self.samples),
            "loader": self.loader,
            "augmentation_views": str(self.views),
            "row": f"{'x'.join(map(str, form.shape))} {form.dtype}{f' as {form.precision}' if form.rounds else ''}",
        }
        entries = self.samples * max(1, self.views)
        return Manifest(
            self._fingerprint(form), entries, form.row_bytes, field_bytes, str(form.stored_dtype), form.order, about
        )

    def _fingerprint(self, form: RowForm) -> str:
        """Name everything that the entries depend on, in hexadecimal digits."""
        device = self.device
        parts = [
            str(FORMAT),
            torch.__version__,
            torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability(),
            torch.get_float32_matmul_precision(),
            str(form),
            str(self.views),
            str(self.seed if self.views else 0),
            str(self.batch_size),
            f"{self.data.__qualname__} {self.samples} {self.structure!r}",
            self.run,
            self.computation,
        ]
        state = hashlib.blake2b(digest_size=16)
        for part in parts:
            state.update(part.encode() + b"\0")
        state.update(self.weights)
        return state.hexdigest()


class CachedValues:
    """The cached values of one loader, the newest last.

    Args:
        directory: folder of the stores.
        limits: limits of room.
        stats: counts what is written.
        notices: takes messages.
        release: called before stores are removed, for those who have them open too.

    Attributes:
        reader: reads entries ahead.
        doubts: how often entries were to be compared with their samples again. What was loaded before the last time
            tells nothing.
        recording: writes new entries.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        limits: Limits,
        stats: CacheStats,
        notices: Notices,
        release: Callable[[], None],
    ) -> None:
        self.reader = ReadAhead()
        self.doubts = 0
        self.recording = Recording(limits, stats, lambda text, cause: notices.warn(text, once=cause))
        self._directory, self._limits, self._stats, self._release = directory, limits, stats, release
        self._levels: list[CachedValue] = []
        self._dropped: list[Path] = []
        self._closed: list[Path] = []
        self._recorded, self._counted_at = 0.0, 0.0
        self.epoch = 0
        self._index()

    def __iter__(self) -> Iterator[CachedValue]:
        return iter(self._levels)

    def __len__(self) -> int:
        return len(self._levels)

    def of(self, key: int, shape: Sequence[int]) -> CachedValue | None:
        """Return the value of a computation, with rows of a shape."""
        return self._by_key.get((key, tuple(shape)))

    def has(self, key: int) -> bool:
        """Whether a computation's value is kept, with rows of any shape."""
        return key in self._keys

    def of_modules(self, paths: frozenset[str]) -> list[CachedValue]:
        """Return the values with these frozen modules behind them."""
        return [one for one in self._levels if one.paths == paths]

    @property
    def come_in_sizes(self) -> bool:
        """Whether a value is kept for inputs of several sizes."""
        return len({(one.paths, one.sizes_behind) for one in self._levels}) > len({one.paths for one in self._levels})

    @property
    def are_nested(self) -> bool:
        """Whether a value follows from another one, in larger modules."""
        return any(one.paths < other.paths for one in self._levels for other in self._levels)

    def is_superseded(self, value: CachedValue) -> bool:
        """Whether the program has not asked for a value since another one, which follows from it, is there."""
        return any(value.paths < one.paths and value.asked < self.epoch for one in self._levels)

    def older_has(self, value: CachedValue, entries: Rows) -> Flags:
        """Return which entries of a value can be computed from another one's."""
        found = np.zeros(len(entries), bool)
        for one in self._levels:
            if one.paths < value.paths:
                found |= one.present(entries)
        return found

    def in_folder(self, folder: Path) -> CachedValue | None:
        """Return the value whose store is in a folder."""
        return next((level for level in self._levels if level.store.folder == folder), None)

    @property
    def all(self) -> list[CachedValue]:
        """The values, the newest last."""
        return self._levels

    def open(
        self,
        origin: Origin,
        value: Tensor,
        field_bytes: int,
        key: int,
        sizes: BatchSizes,
        sizes_behind: frozenset[tuple[int, ...]] = frozenset(),
    ) -> str:
        """Keep another value from now on; return what it will take, in words.

        Args:
            origin: what the entries are computed from.
            value: what a batch gives, ``[samples, ...]``.
            field_bytes: most bytes of the encoded fields of a sample.
            key: number of the computation.
            sizes: sizes of batches that entries may be used in.
            sizes_behind: shapes of what it follows from, by sample.

        Raises:
            StoreError, CacheError: it cannot be opened.
        """
        form, device = RowForm.of(value, self._limits.precision), origin.device
        manifest = origin.manifest(form, field_bytes)
        entries = manifest.entries
        size = entries * (form.row_bytes + manifest.field_bytes + manifest.header_bytes)
        store, room = self._directory.open(manifest, size, self._limits.max_bytes, self._limits.min_free_bytes)
        host_bytes = self._limits.host.take(entries * form.row_bytes)
        host = MemoryTier(host_bytes, form, entries, torch.device("cpu"))
        device_bytes = self._limits.device_bytes if device.type != "cpu" else 0
        tier = MemoryTier(device_bytes, form, entries, device)
        known = np.zeros((entries, 2), np.uint64), np.zeros(entries, bool)
        shape = tuple(value.shape[1:])
        made = CachedValue(
            *(key, shape, frozenset(origin.paths), form, store, host, tier, *known, sizes),
            doubts=self.doubts,
            asked=self.epoch,
            host_bytes=host_bytes,
            sizes_behind=sizes_behind,
        )
        self._levels.append(made)
        self._index()
        self.recording.restart(self._taken_by_others())
        share = "" if size <= room else f", of which {room / size:.0%} fit"
        return (
            f"an output of {origin.modules} will take about {filesize.decimal(size)} in {store.folder} "
            f"({entries} entries of {form.row_bytes} bytes){share}"
        )

    def read_ahead(self, number: int, value: CachedValue, entries: Rows, pin: bool) -> Future[Found]:
        """Have rows read for a batch in another thread."""

        def job() -> Found:
            with spending(self._stats, time.thread_time):
                return value.read(entries, pin)

        return self.reader.submit(number, job)

    def begin_epoch(self, epoch: int) -> None:
        """See what other processes have written, and drop values that were not asked for in an epoch."""
        self.epoch = epoch
        self.reader.cancel()
        self._remove_dropped()
        for level in self._levels:
            with contextlib.suppress(StoreError, OSError):  # then its entries are missing one by one
                level.store.refresh()
        last = max((one.asked for one in self._levels), default=0)
        if unused := [one for one in self._levels if one.asked < last]:
            self.drop(unused)

    def forget_verified(self, ids: Rows | None, views: int) -> None:
        """Compare entries with their samples before they are used again; those of all samples by default."""
        self.recording.finish()  # an entry that is written later would count as compared
        self.doubts += 1
        for level in self._levels:
            level.doubts = self.doubts
            level.verified.reshape(-1, max(1, views))[slice(None) if ids is None else ids] = False

    def forget(self, level: CachedValue, entries: Rows) -> None:
        """Make misses of entries whose samples have changed."""
        self.recording.finish()
        level.forget(entries)

    def drop(self, levels: Sequence[CachedValue] | None = None) -> None:
        """Close levels and remove their stores; all by default."""
        levels = list(self._levels if levels is None else levels)
        if levels:
            self.reader.cancel()
            self.recording.finish()
        self._release()  # an open store is not removed
        for level in levels:
            self._levels.remove(level)
            self._limits.host.free += level.host_bytes
            level.store.close()
            self._dropped.append(level.store.folder)
        self._index()
        self._remove_dropped()

    def _index(self) -> None:
        self._stats.values = len(self._levels) or self._stats.values
        self._by_key = {(level.key, level.shape): level for level in self._levels}
        self._keys = {level.key for level in self._levels}

    def close(self, remove: bool) -> None:
        """Stop reading and writing; ``remove`` the stores too, or leave them on disk. Safe to call twice."""
        self.reader.close()
        self.recording.close()
        self.measure_disk()
        self._release()
        self._release = lambda: None  # it may hold a dataset
        for level in self._levels:
            level.store.close()
            self._closed.append(level.store.folder)
        self._levels = []
        self._index()
        if remove:
            self._dropped += self._closed
        self._remove_dropped()

    def measure_disk(self) -> None:
        """Update ``bytes_on_disk`` of the statistics."""
        if self._levels:
            self._stats.bytes_on_disk = bytes_on_disk(self._levels)

    def progress_text(self) -> str | None:
        """How much of the deepest level is there, in words; None while nothing is cached, and when all of it is."""
        if not self._levels or not self.recording.active:
            return None
        now = time.monotonic()
        if now - self._counted_at > COUNT_EVERY_S:  # a bar asks at each step, and there may be millions of entries
            index = self._levels[-1].store.index
            self._counted_at, self._recorded = now, np.count_nonzero(index) / max(1, len(index))
        return f"{self._recorded:.0%}" if self._recorded < 1 else None

    def _taken_by_others(self) -> int:
        own = {level.store.folder for level in self._levels}
        with contextlib.suppress(CacheError):  # the folder can no longer be read
            return sum(one.bytes_on_disk for one in self._directory.summaries() if one.folder not in own)
        return 0

    def _remove_dropped(self) -> None:
        """Remove stores that are of no use; those that a worker process still has open later."""
        self._dropped = [folder for folder in self._dropped if not self._directory.remove(folder) and folder.exists()]
