"""The folder that holds stores: private to its user, bounded in size."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np

from lightning_egeria.caching.store.manifest import (
    LOCK,
    MANIFEST,
    Manifest,
    is_in_use,
    is_store_name,
    read_manifest,
    remove_store,
)
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.core.programs import files
from lightning_egeria.errors import CacheError, StoreBusyError, StoreError

MOST_TIMES_LARGER = 1024  # an existing store may have at most this many times the requested entries


@dataclasses.dataclass(frozen=True)
class StoreSummary:
    """One store of the folder.

    Attributes:
        folder: of the store.
        manifest: what it holds; None if that cannot be read.
        problem: what is wrong with it; None: nothing.
        bytes_on_disk: that it takes.
        present: entries that are there.
        in_use: a run has it open.
        used_seconds_ago: since something was last written or opened.
    """

    folder: Path
    manifest: Manifest | None
    problem: str | None
    bytes_on_disk: int
    present: int
    in_use: bool
    used_seconds_ago: float


class CacheDirectory:
    """A folder of stores.

    Args:
        path: made if it is not there, with its parents, for its user only.
        make: False: it must be there.

    Raises:
        CacheError: it cannot be made or written, belongs to someone else, or others may write to it.
    """

    def __init__(self, path: Path, make: bool = True) -> None:
        self.path = path.expanduser().absolute()
        try:
            if make:
                files.make_private(self.path, close=False)
            files.check_private(self.path)
            files.check_above(self.path)
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise _unusable(self.path, "made" if make else "read", error) from error
            raise CacheError(
                f"the cache directory {self.path} is not this user's alone: {error.filename}: {error.strerror}. "
                "`chmod 700` it, or choose one of your own"
            ) from error
        except OSError as error:
            raise _unusable(self.path, "made" if make else "read", error) from error

    def open(self, manifest: Manifest, wanted: int, max_bytes: int, min_free_bytes: int) -> tuple[ActivationStore, int]:
        """Open the store of ``manifest``, made if it is not there; returns it and the bytes that it may take.

        Stores that are not open make room for the ``wanted`` bytes, those that were used longest ago first.

        Raises:
            StoreError: it cannot be read or written.
        """
        folder = self.path / manifest.fingerprint
        try:
            store = ActivationStore.create(folder, _in_form_of(folder, manifest))
        except StoreBusyError:
            raise
        except StoreError:
            remove_store(folder)  # what was there was damaged, unless another process has just made it
            store = ActivationStore.create(folder, _in_form_of(folder, manifest))
        try:
            return store, self._room(store, wanted, max_bytes, min_free_bytes)
        except (OSError, CacheError) as error:
            store.close()
            raise StoreError(str(error)) from error

    def _room(self, store: ActivationStore, wanted: int, max_bytes: int, min_free_bytes: int) -> int:
        with contextlib.suppress(OSError):
            os.utime(store.folder)
        others = sorted(self.summaries(), key=lambda summary: -summary.used_seconds_ago)
        taken = sum(summary.bytes_on_disk for summary in others if summary.folder != store.folder)
        for summary in others:
            free = shutil.disk_usage(self.path).free
            fits = taken + wanted <= max_bytes
            if fits and free - (wanted - store.disk_bytes) >= min_free_bytes:
                break
            if summary.folder != store.folder and remove_store(summary.folder):
                taken -= summary.bytes_on_disk
        free = shutil.disk_usage(self.path).free - min_free_bytes + store.disk_bytes
        return max(0, min(free, max_bytes - taken))

    def half_of_the_disk(self) -> int:
        """Bytes: half of what is free, or taken by the stores that are here."""
        taken = sum(summary.bytes_on_disk for summary in self.summaries())
        return (shutil.disk_usage(self.path).free + taken) // 2

    def remove(self, folder: Path) -> bool:
        """Delete a store unless another process has it open; returns whether it is gone."""
        return remove_store(folder)

    def summaries(self) -> list[StoreSummary]:
        """All stores, and all folders that look like one.

        Raises:
            CacheError: the directory cannot be read.
        """
        try:
            folders = sorted(self.path.iterdir())
        except OSError as error:
            raise _unusable(self.path, "read", error) from error
        found = []
        for folder in folders:
            # No folder with another name is read, deleted, nor written to a terminal.
            if is_store_name(folder.name) and not folder.is_symlink():
                with contextlib.suppress(OSError):  # gone meanwhile, or not readable
                    if folder.is_dir() and any((folder / name).exists() for name in (MANIFEST, LOCK)):
                        found.append(self._summary(folder))
        return found

    def verify(self, folder: Path) -> tuple[int, int]:
        """Read every entry of a store; returns how many are sound and how many are damaged.

        Raises:
            StoreError: the store cannot be opened.
        """
        store = ActivationStore(folder)
        try:
            buffer = store.buffer()
            present = np.flatnonzero(store.index)
            sound = sum(
                store.read(int(number), buffer) is not None and store.read_fields(int(number)) is not None
                for number in present
            )
            return sound, len(present) - sound
        finally:
            store.close()

    def _summary(self, folder: Path) -> StoreSummary:
        used = 0.0
        size = 0
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                status = file.lstat()
                used, size = max(used, status.st_mtime), size + status.st_blocks * 512
        with contextlib.suppress(OSError):
            used = max(used, folder.stat().st_mtime)
        try:
            store = ActivationStore(folder)
        except StoreError as error:
            return StoreSummary(folder, None, str(error), size, 0, is_in_use(folder), time.time() - used)
        present = int(np.count_nonzero(store.index))
        store.close()
        return StoreSummary(folder, store.manifest, None, size, present, is_in_use(folder), time.time() - used)


def _in_form_of(folder: Path, manifest: Manifest) -> Manifest:
    """With the sizes of the store that is there, if it is of these entries: how long they may be was estimated."""
    try:
        found = read_manifest(folder)
    except StoreError:
        return manifest
    likely = all(
        size <= MOST_TIMES_LARGER * max(wanted, 64)
        for size, wanted in (
            (found.activation_bytes, manifest.activation_bytes),
            (found.field_bytes, manifest.field_bytes),
        )
    )
    sized = dataclasses.replace(manifest, activation_bytes=found.activation_bytes, field_bytes=found.field_bytes)
    return sized if likely else manifest


def _unusable(path: Path, wanted: str, error: OSError) -> CacheError:
    return CacheError(f"the cache directory {path} cannot be {wanted}: {error.strerror or error}")


def default_cache_dir() -> Path:
    """``lightning_egeria`` in the user's cache folder.

    Raises:
        CacheError: this user has no home directory, and no variable names a folder.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "lightning_egeria"
    except RuntimeError as error:
        raise CacheError("this user has no home directory. Name a cache directory, or set XDG_CACHE_HOME") from error
