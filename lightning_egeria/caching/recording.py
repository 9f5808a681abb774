"""Writing new entries of a level, as long as there is room."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lightning_egeria.caching.background import WriteBehind
from lightning_egeria.caching.levels import Level, Pieces, RowForm, Rows, pieces_of
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.caching.steps import Step


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much room the cache may take, in bytes."""

    max_bytes: int
    min_free_bytes: int
    host_bytes: int
    device_bytes: int


class Recording:
    """Writes what steps have computed, in the background; ends where there is no room, or no disk, for more.

    Args:
        limits: of room.
        stats: where written entries are counted.
        warn: tells the user; called with a text and what it is about.

    Attributes:
        active: whether anything is still written.
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
        """A new level is there, and stores of others take ``others`` bytes beside this run's."""
        self.active, self._error, self._others = True, None, others

    def write(self, step: Step, levels: Sequence[Level], fields: Sequence[bytes | None] | None) -> None:
        """Have the new rows of a step written.

        Args:
            step: that computed the activation of the newest level.
            levels: that are cached, the newest last.
            fields: what the entry of each sample holds besides; None for those that are not written, or for all.
        """
        level = levels[-1]
        if self._error is not None:
            self._end("the disk", self._error, level)
        activation, lengths = step.computed, step.loaded.lengths
        if not self.active or activation is None or fields is None:
            return
        if level.form.ragged and (lengths is None or activation.ndim < 2 or activation.shape[1] != step.length):
            return
        if RowForm.of(activation, level.form.ragged) != level.form:
            return  # of another size: never a hit
        entries = step.entries
        new = ~level.present(entries) & np.array([field is not None for field in fields])
        if lengths is not None and step.length is not None:  # the collate function has cut longer ones off
            new &= np.asarray(lengths) <= step.length
        if not new.any():
            return
        places = np.flatnonzero(new).tolist()
        chosen = tuple(fields[place] or b"" for place in places)
        own = [lengths[place] for place in places] if lengths is not None else None
        rows = pieces_of(level.form, activation[torch.from_numpy(new).to(activation.device)], own)
        if level.made.numbers:
            rows = dataclasses.replace(rows, digests=np.frombuffer(b"".join(chosen), "<u8").astype(np.uint64))
        if level.device.capacity:
            level.device.put(entries[new], rows)
        size = rows.data.nbytes + sum(map(len, chosen))
        if self._has_room(levels, size):
            self._stats.to_write += len(places)
            host = dataclasses.replace(rows, data=rows.data.cpu())
            self._writer.submit(lambda: self._write(level, entries[new], host, chosen), size)

    def finish(self) -> None:
        """Wait until all is written."""
        self._writer.finish()

    def close(self) -> None:
        """Write what is waiting, and nothing any more. Safe to call twice."""
        self.active = False
        self._writer.close()

    def _write(self, level: Level, entries: Rows, rows: Pieces, fields: tuple[bytes, ...]) -> None:
        try:
            self._stats.written += level.write(entries, rows, fields)
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
                "are there and stay in use; all other samples run the frozen layers",
                cause,
            )


def bytes_on_disk(levels: Sequence[Level]) -> int:
    """What the stores take at this moment."""
    with contextlib.suppress(OSError):
        return sum(level.store.disk_bytes for level in levels)
    return 0
