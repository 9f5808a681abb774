"""The cached boundaries of one loader, from the opening of their stores to the removal, and what entries depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_egeria.caching.front import Front
from lightning_egeria.caching.levels import Level, Recording, bytes_on_disk
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.errors import CacheError, StoreError
from lightning_egeria.stores.background import ReadAhead
from lightning_egeria.stores.directory import CacheDirectory
from lightning_egeria.stores.limits import Limits
from lightning_egeria.stores.manifest import FORMAT, Manifest
from lightning_egeria.stores.memory import MemoryTier
from lightning_egeria.stores.rows import RowForm, Rows
from lightning_egeria.training.notices import Notices

COUNT_EVERY_S = 1.0
ROOM = 2  # times the length of the first batch: what longer batches compute is not kept
LEAST_ROOM = 64


@dataclasses.dataclass(frozen=True)
class Origin:
    """What the entries of one boundary are computed from: two runs share a store only if all of it is the same.

    Attributes:
        loader: ``"training"`` or the name of a validation loader.
        data: class of the dataset.
        samples: number of its samples.
        structure: structure of a sample.
        views: variants of each sample.
        seed: seed of the views.
        run: text that no other run has, where entries are of use in one run only; else empty.
        computation: how the front and the program make rows of samples.
        batch_size: size of the batch; rows of others may differ in their last bits.
        front: the frozen front.
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
    front: Front

    def manifest(self, form: RowForm, field_bytes: int) -> Manifest:
        """Return the manifest of a store for rows of a form, with encoded fields of at most so many bytes."""
        about = {
            "model": type(self.front.prefix.module).__name__,
            "boundary": self.front.units[-1].path,
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
        device = self.front.device
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
        state.update(self.front.state.digest)
        return state.hexdigest()


class LevelSet:
    """The levels of one loader, the deepest last.

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
        self._levels: list[Level] = []
        self._dropped: list[Path] = []
        self._closed: list[Path] = []
        self._recorded, self._counted_at = 0.0, 0.0
        self._host_bytes = 0  # that the newest level may use

    def __iter__(self) -> Iterator[Level]:
        return iter(self._levels)

    def __len__(self) -> int:
        return len(self._levels)

    def at(self, depth: int) -> Level | None:
        """Return the level of a boundary."""
        return next((level for level in self._levels if level.depth == depth), None)

    def of(self, folder: Path) -> Level | None:
        """Return the level whose store is in a folder."""
        return next((level for level in self._levels if level.store.folder == folder), None)

    @property
    def all(self) -> list[Level]:
        """The levels, the deepest last."""
        return self._levels

    def open(self, origin: Origin, value: Tensor, ragged: bool, field_bytes: int, key: int) -> str:
        """Open the level of a deeper boundary; return what it will take, in words.

        Args:
            origin: what the entries are computed from.
            value: activation of a batch, ``[samples, ...]``.
            ragged: whether rows of other batches have other lengths.
            field_bytes: most bytes of the encoded fields of a sample.
            key: number of the computation whose results the entries are.

        Raises:
            StoreError, CacheError: it cannot be opened.
        """
        form, device = RowForm.of(value, self._limits.precision), origin.front.device
        row_bytes = form.row_bytes
        if ragged:
            form = form.with_room(form_length(value.shape[1]))
        manifest = origin.manifest(form, field_bytes)
        entries = manifest.entries
        size = entries * (row_bytes + manifest.field_bytes + manifest.header_bytes)
        store, room = self._directory.open(manifest, size, self._limits.max_bytes, self._limits.min_free_bytes)
        for older in self._levels:
            older.release_memory()
        self._limits.host.free += self._host_bytes
        self._host_bytes = self._limits.host.take(entries * form.row_bytes)
        host = MemoryTier(self._host_bytes, form, entries, torch.device("cpu"))
        device_bytes = self._limits.device_bytes if device.type != "cpu" else 0
        known = np.zeros((entries, 2), np.uint64), np.zeros(entries, bool), np.zeros(entries, np.int32)
        tier = MemoryTier(device_bytes, form, entries, device)
        self._levels.append(Level(origin.front.depth, key, form, store, host, tier, *known, doubts=self.doubts))
        self.recording.restart(self._taken_by_others())
        share = "" if size <= room else f", of which {room / size:.0%} fit"
        return (
            f"the outputs of {origin.front.units[-1].path!r} will take about {size / 1e9:.2f} GB in {store.folder} "
            f"({entries} entries of {row_bytes} bytes){share}"
        )

    def begin_epoch(self) -> None:
        """See what other processes have written, and drop levels that the deepest one has replaced."""
        self.reader.cancel()
        self._remove_dropped()
        for level in self._levels:
            with contextlib.suppress(StoreError, OSError):  # then its entries are missing one by one
                level.store.refresh()
        if len(self._levels) > 1:
            newest = self._levels[-1].store.index != 0
            self.drop([one for one in self._levels[:-1] if not ((one.store.index != 0) & ~newest).any()])

    def forget_verified(self, ids: Rows | None, views: int) -> None:
        """Compare entries with their samples before they are used again; those of all samples by default."""
        self.recording.finish()  # an entry that is written later would count as compared
        self.doubts += 1
        for level in self._levels:
            level.doubts = self.doubts
            level.verified.reshape(-1, max(1, views))[slice(None) if ids is None else ids] = False

    def forget(self, level: Level, entries: Rows) -> None:
        """Make misses of entries whose samples have changed."""
        self.recording.finish()
        level.forget(entries)

    def drop(self, levels: Sequence[Level] | None = None) -> None:
        """Close levels and remove their stores; all by default."""
        levels = list(self._levels if levels is None else levels)
        if levels:
            self.reader.cancel()
            self.recording.finish()
        self._release()  # an open store is not removed
        for level in levels:
            self._levels.remove(level)
            level.store.close()
            self._dropped.append(level.store.folder)
        self._remove_dropped()

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
        with contextlib.suppress(CacheError):  # nobody may read the folder any longer
            return sum(one.bytes_on_disk for one in self._directory.summaries() if one.folder not in own)
        return 0

    def _remove_dropped(self) -> None:
        """Remove stores that are of no use; those that a worker process still has open later."""
        self._dropped = [folder for folder in self._dropped if not self._directory.remove(folder) and folder.exists()]


def form_length(length: int) -> int:
    """Return the length of a ragged form, from that of the first batch: a power of two, so that later runs agree."""
    return max(LEAST_ROOM, 1 << (ROOM * length - 1).bit_length())
