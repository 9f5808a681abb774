"""Writing new entries of a level, as long as there is room."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.levels import STAMP_BYTES, Level, Rows, chosen
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.stores.background import WriteBehind
from lightning_egeria.stores.rows import Precision


@dataclasses.dataclass
class Budget:
    """Bytes of memory that several loaders share; the first to ask gets what it needs.

    >>> budget = Budget(10)
    >>> budget.take(7), budget.take(7)
    (7, 3)
    """

    free: int

    def take(self, most: int) -> int:
        """Return how many bytes may be used, which are others' no longer."""
        taken = min(most, self.free)
        self.free -= taken
        return taken


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much room the entries of a loader may take, and in what precision they are kept.

    Attributes:
        max_bytes: of all stores.
        min_free_bytes: to leave free on the disk.
        host: for entries in the memory of the host.
        device_bytes: for entries in the memory of the device that trains.
        precision: of the entries.
    """

    max_bytes: int
    min_free_bytes: int
    host: Budget
    device_bytes: int
    precision: Precision | None = None


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
