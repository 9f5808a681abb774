"""Boundary activations on disk: one slot of fixed size for each entry, and an index of what is there.

A store is a folder of three files. ``manifest.json`` says what the entries are; ``entries`` holds one slot per entry,
at ``number * slot_bytes``: a header with the lengths and checksums, the other fields of the sample, the activation;
``index`` holds four bytes per entry, written last: a part of the header's checksum, or zero. An entry counts only where
index, header and data agree, so one that is absent, torn, changed or of another store is a miss and never an error.
What is read is not believed: no allocation is larger than the file that asks for it, and links are not followed.

Slots that were not written take no room on a file system with sparse files. Several processes may read and write one
store: all processes that write an entry write the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lightning_egeria.caching.store.manifest import (
    ENTRIES,
    HEADER,
    INDEX,
    LOCK,
    MANIFEST,
    MAX_DIMENSIONS,
    VALUE_BYTES,
    Manifest,
    read_manifest,
    share,
)
from lightning_egeria.core.programs import files
from lightning_egeria.errors import StoreError

_Parts = tuple[tuple[int, ...], int, int, int, int]  # shape, both lengths and both checksums of an entry


class ActivationStore:
    """One store, open for reading and writing. Threads may share it.

    Args:
        folder: of the store; made by `create`.

    Attributes:
        manifest: what the entries are.
        index: part of each entry's checksum, ``[entries]``; zero: absent. Four bytes of memory an entry.

    Raises:
        StoreError: there is none, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._name = xxhash.xxh3_64_intdigest(self.manifest.fingerprint.encode())
        self._value_bytes = VALUE_BYTES[self.manifest.dtype]
        self.index = np.zeros(0, np.uint32)
        self._files: list[int] = []
        try:
            # A shared lock for as long as it is open: `remove_store` leaves it alone.
            self._lock = self._open(LOCK, os.O_RDWR)
            share(self._lock, folder)
            self._entries = self._open(ENTRIES, os.O_RDWR)
            self._index = self._open(INDEX, os.O_RDWR)
            self.refresh()
        except OSError as error:
            self.close()
            raise StoreError(f"{folder}: {error.strerror or error}") from error
        except StoreError:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> ActivationStore:
        """Make the store, or open the one that is there.

        Raises:
            StoreError: the folder holds a store of other entries, or cannot be written.
        """
        manifest.check()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            files.check_private(folder, links=False)
            for name, size in ((LOCK, 0), (ENTRIES, 0), (INDEX, manifest.entries * 4)):
                # Another process may be doing the same: what exists is left as it is, and only ever extended.
                file = files.open_file(folder / name, os.O_RDWR | os.O_CREAT)
                try:
                    if os.fstat(file).st_size < size:
                        os.ftruncate(file, size)
                finally:
                    os.close(file)
            if not (folder / MANIFEST).exists():
                files.write_once(folder / MANIFEST, manifest.to_json())
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror or error}") from error
        store = cls(folder)
        if dataclasses.replace(store.manifest, about={}) != dataclasses.replace(manifest, about={}):
            store.close()
            raise StoreError(f"{folder} holds entries of another form")
        return store

    def refresh(self) -> None:
        """Read the index again: another process may have written entries."""
        size = self.manifest.entries * 4
        if os.fstat(self._index).st_size != size:
            raise StoreError(f"{self.folder / INDEX} does not have {size} bytes")
        data = np.zeros(self.manifest.entries, np.uint32)
        view = data.view(np.uint8)
        for start, end in _written(self._index, size):
            if os.preadv(self._index, [view[start:end].data], start) != end - start:
                raise StoreError(f"{self.folder / INDEX} ends early")
        if len(self.index) != len(data):
            self.index = data
            return
        new = np.flatnonzero((data != 0) & (self.index == 0))  # never overwritten with nothing: a thread may be writing
        self.index[new] = data[new]

    def write(self, number: int, activation: npt.NDArray[np.uint8], shape: tuple[int, ...], fields: bytes) -> int:
        """Write one entry; returns its bytes, or 0 if there is no slot for it or it is larger than its slot.

        Args:
            number: of the entry.
            activation: its bytes, ``[bytes]``.
            shape: of the activation, without the batch dimension.
            fields: the other fields of the sample.

        Raises:
            OSError: the disk is full, say.
        """
        if activation.nbytes > self.manifest.activation_bytes or len(fields) > self.manifest.field_bytes:
            return 0
        if not 0 <= number < self.manifest.entries or len(shape) > MAX_DIMENSIONS:
            return 0
        padded = [*shape, *[0] * (MAX_DIMENSIONS - len(shape))]
        header = HEADER.pack(
            self._name,
            len(shape),
            *padded,
            activation.nbytes,
            len(fields),
            number,
            xxhash.xxh3_64_intdigest(activation.data),
            xxhash.xxh3_64_intdigest(fields),
        )
        parts: list[Any] = [header, fields.ljust(self.manifest.field_bytes, b"\0"), activation.data]
        size = len(header) + self.manifest.field_bytes + activation.nbytes
        if os.pwritev(self._entries, parts, number * self.manifest.slot_bytes) != size:
            raise OSError(f"{self.folder / ENTRIES}: the entry was written in part")
        mark = np.uint32(_mark(header))
        os.pwrite(self._index, mark.tobytes(), number * 4)
        self.index[number] = mark
        return size

    def buffer(self) -> npt.NDArray[np.uint8]:
        """Memory for the largest activation that is there: no more than the file, whatever the manifest says."""
        return np.empty(min(self.manifest.activation_bytes, os.fstat(self._entries).st_size), np.uint8)

    def read(self, number: int, into: npt.NDArray[np.uint8]) -> tuple[int, ...] | None:
        """Read the activation of one entry.

        Args:
            number: of the entry.
            into: ``[bytes]`` that the activation fits into; what is behind it may be overwritten too.

        Returns:
            The shape of the activation without the batch dimension; None for a miss.
        """
        found = self._read(number, into)
        return found[1][0] if found is not None else None

    def read_both(self, number: int, into: npt.NDArray[np.uint8]) -> tuple[tuple[int, ...], bytes | None] | None:
        """Read the activation of one entry, as `read` does, and its fields, as they are at the same moment.

        Returns:
            The shape, and the fields, None where they are damaged; None for a miss.
        """
        found = self._read(number, into)
        return (found[1][0], _fields(*found)) if found is not None else None

    def _read(self, number: int, into: npt.NDArray[np.uint8]) -> tuple[bytearray, _Parts] | None:
        """Header and fields as they are in the file, and what the header says."""
        size = HEADER.size + self.manifest.field_bytes
        if not self._reaches(number, size):
            return None
        front = bytearray(size)
        try:
            count = os.preadv(self._entries, [front, into.data], number * self.manifest.slot_bytes)
            parts = self._checked(number, front[: HEADER.size])
        except OSError:
            return None
        if parts is None:
            return None
        _, length, _, checksum, _ = parts
        if count < len(front) + length or length > into.nbytes:
            return None
        return (front, parts) if xxhash.xxh3_64_intdigest(into[:length].data) == checksum else None

    def read_fields(self, number: int) -> bytes | None:
        """Read the other fields of the sample; None for a miss."""
        size = HEADER.size + self.manifest.field_bytes
        if not self._reaches(number, size):
            return None
        try:
            front = os.pread(self._entries, size, number * self.manifest.slot_bytes)
            parts = self._checked(number, front[: HEADER.size])
        except OSError:
            return None
        if parts is None:
            return None
        return _fields(front, parts)

    def forget(self, number: int) -> None:
        """Make a miss of an entry that was found to be wrong."""
        self.index[number] = 0
        with contextlib.suppress(OSError):  # read-only by now; the next reader finds it out by itself
            os.pwrite(self._index, bytes(4), number * 4)

    @property
    def disk_bytes(self) -> int:
        """What the store takes on disk at this moment."""
        return sum(os.fstat(file).st_blocks * 512 for file in self._files)

    @property
    def exists(self) -> bool:
        """Whether the folder still holds the files that are open here."""
        try:
            return os.fstat(self._entries).st_ino == (self.folder / ENTRIES).stat().st_ino
        except OSError:
            return False

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self._entries = self._index = -1  # so that a late caller reaches no other file
        while self._files:
            os.close(self._files.pop())

    def _open(self, name: str, flags: int) -> int:
        self._files.append(files.open_file(self.folder / name, flags))
        return self._files[-1]

    def _reaches(self, number: int, size: int) -> bool:
        """Whether the file goes on so far behind the beginning of an entry: else that much memory is not asked for."""
        if not 0 <= number < len(self.index):
            return False
        try:
            return number * self.manifest.slot_bytes + size <= os.fstat(self._entries).st_size
        except OSError:
            return False

    def _checked(self, number: int, header: bytes | bytearray) -> _Parts | None:
        """Shape, both lengths and both checksums of an entry, if its header is what the index says it is."""
        if len(header) != HEADER.size:
            return None
        mark = _mark(header)
        if mark != self.index[number]:  # another process may have written it since the index was read
            written = os.pread(self._index, 4, number * 4)
            if len(written) != 4 or int.from_bytes(written, sys.byteorder) != mark:
                return None
            self.index[number] = mark
        name, dimensions, *rest = HEADER.unpack(header)
        length, field_length, written_number, checksum, field_checksum = rest[MAX_DIMENSIONS:]
        if name != self._name or dimensions > MAX_DIMENSIONS or written_number != number:
            return None
        if length > self.manifest.activation_bytes or field_length > self.manifest.field_bytes:
            return None
        shape = tuple(rest[:dimensions])
        if math.prod(shape) * self._value_bytes != length:
            return None
        return shape, length, field_length, checksum, field_checksum


def _written(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that are on disk. What was never written takes no memory either."""
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing was written behind this
                return
            raise
        end = min(os.lseek(file, start, os.SEEK_HOLE), size)
        yield start, end


def _mark(header: bytes | bytearray) -> int:
    """What the index holds of an entry: never zero."""
    return xxhash.xxh3_64_intdigest(header) & 0xFFFFFFFF or 1


def _fields(front: bytes | bytearray, parts: _Parts) -> bytes | None:
    """The fields of an entry behind its header; None: they are damaged."""
    _, _, length, _, checksum = parts
    fields = bytes(front[HEADER.size : HEADER.size + length])
    return fields if len(fields) == length and xxhash.xxh3_64_intdigest(fields) == checksum else None
