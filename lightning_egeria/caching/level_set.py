"""The cached boundaries of one loader: their stores are opened, refreshed, dropped and removed here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_egeria.caching.background import ReadAhead
from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.lengths import form_length
from lightning_egeria.caching.levels import Level, MemoryTier, RowForm, Rows
from lightning_egeria.caching.manifest import StoreError
from lightning_egeria.caching.origin import Origin
from lightning_egeria.caching.recording import Limits, Recording, bytes_on_disk
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.errors import CacheError
from lightning_egeria.training.notices import Notices

COUNT_EVERY_S = 1.0


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
        self.recording = Recording(limits, stats, lambda text, cause: notices.warn(text, once=cause))
        self._directory, self._limits, self._stats, self._release = directory, limits, stats, release
        self._levels: list[Level] = []
        self._dropped: list[Path] = []
        self._recorded, self._counted_at = 0.0, 0.0

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
        form, device = RowForm.of(value), origin.front.device
        row_bytes = form.row_bytes
        if ragged:
            form = form.with_room(form_length(value.shape[1]))
        manifest = origin.manifest(form, field_bytes)
        entries = manifest.entries
        size = entries * (row_bytes + manifest.field_bytes + manifest.header_bytes)
        store, room = self._directory.open(manifest, size, self._limits.max_bytes, self._limits.min_free_bytes)
        host = MemoryTier(self._limits.host_bytes, form, entries, torch.device("cpu"))
        device_bytes = self._limits.device_bytes if device.type != "cpu" else 0
        known = np.zeros((entries, 2), np.uint64), np.zeros(entries, bool), np.zeros(entries, np.int32)
        tier = MemoryTier(device_bytes, form, entries, device)
        for older in self._levels:
            older.release_memory()
        self._levels.append(Level(origin.front.depth, key, form, store, host, tier, *known))
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
        for level in self._levels:
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
        for level in self._levels:
            level.store.close()
            if remove:
                self._dropped.append(level.store.folder)
        self._levels = []
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
