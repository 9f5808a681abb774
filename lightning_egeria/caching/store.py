"""Boundary activations on disk: one slot of fixed size for each entry, and an index of what is there.

A store is a folder of three files. ``manifest.json`` says what the entries are; ``entries`` holds one slot per entry,
at ``number * slot_bytes``: a header with the lengths and checksums, the other fields of the sample, the activation;
``index`` holds four bytes per entry, written last: a part of the header's checksum, or zero. An entry counts only where
index, header and data agree, so one that is absent, torn, changed or of another store is a miss and never an error.

Slots that were not written take no room on a file system with sparse files. Several processes may read and write one
store: whoever writes an entry writes the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

try:
    import fcntl
except ImportError as error:  # Windows
    raise ImportError("the cache of the frozen prefix needs a POSIX system, such as Linux or macOS") from error

FORMAT = 1
MANIFEST, ENTRIES, INDEX, LOCK = "manifest.json", "entries", "index", "lock"
MAX_DIMENSIONS = 6
MAX_ENTRIES = 2**40
# magic, dimensions, shape, bytes of the activation, bytes of the fields, number of the entry, checksums of both parts
_HEADER = struct.Struct(f"<4sI{MAX_DIMENSIONS}QQQQQQ")
_MAGIC = b"LE01"
_ALIGNMENT = 64


class StoreError(Exception):
    """The store cannot be read or written as it is; the message says why."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the entries of a store are.

    Attributes:
        fingerprint: names the prefix and the data, in hexadecimal; the name of the folder.
        entries: how many slots there are.
        activation_bytes: of the largest activation that fits into a slot.
        field_bytes: of the largest encoded fields that fit into a slot.
        dtype: of the activations.
        order: dimensions of a batch of activations from the slowest to the fastest in memory.
        about: what it was made of, in words: for people only.
    """

    fingerprint: str
    entries: int
    activation_bytes: int
    field_bytes: int
    dtype: str
    order: tuple[int, ...]
    about: dict[str, str]

    @property
    def header_bytes(self) -> int:
        """Of each entry."""
        return _HEADER.size

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        size = _HEADER.size + self.activation_bytes + self.field_bytes
        return math.ceil(size / _ALIGNMENT) * _ALIGNMENT

    def to_json(self) -> str:
        """`from_json` is the inverse."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read and check.

        Raises:
            StoreError: it is not what `to_json` writes, or of another version.
        """
        try:
            state = json.loads(text)
            version = state.pop("format")
            manifest = cls(**{**state, "order": tuple(state["order"])})
            numbers = (manifest.entries, manifest.activation_bytes, manifest.field_bytes, *manifest.order)
            texts = [manifest.fingerprint, manifest.dtype, *manifest.about.keys(), *manifest.about.values()]
            sound = all(type(number) is int and number >= 0 for number in numbers)
            sound = sound and all(type(text) is str for text in texts)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(f"{MANIFEST} is not that of a store: {error}") from error
        if version != FORMAT:
            raise StoreError(f"the store has format {version!r}, this version of lightning_egeria reads {FORMAT}")
        if not sound or manifest.entries * manifest.slot_bytes > MAX_ENTRIES * _ALIGNMENT:
            raise StoreError(f"{MANIFEST} says what no store can be")
        return manifest


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
        self.index = np.zeros(0, np.uint32)
        self._files: list[int] = []
        try:
            # A shared lock for as long as it is open: `remove_store` leaves it alone.
            self._lock = self._open(LOCK, os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for name, size in ((LOCK, 0), (ENTRIES, 0), (INDEX, manifest.entries * 4)):
                # Another process may be doing the same: what exists is left as it is, and only ever extended.
                file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    if os.fstat(file).st_size < size:
                        os.ftruncate(file, size)
                finally:
                    os.close(file)
            if not (folder / MANIFEST).exists():
                draft = folder / f"{MANIFEST}.{os.getpid()}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as stream:
                    stream.write(manifest.to_json())
                draft.replace(folder / MANIFEST)
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
        data = np.empty(self.manifest.entries, np.uint32)
        if size and os.preadv(self._index, [data.data], 0) != size:
            raise StoreError(f"{self.folder / INDEX} ends early")
        if len(self.index) != len(data):
            self.index = data
            return
        new = np.flatnonzero((data != 0) & (self.index == 0))  # never overwritten with nothing: a thread may be writing
        self.index[new] = data[new]

    def write(self, number: int, activation: npt.NDArray[np.uint8], shape: tuple[int, ...], fields: bytes) -> int:
        """Write one entry; returns its bytes, or 0 if it is larger than a slot.

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
        padded = [*shape, *[0] * (MAX_DIMENSIONS - len(shape))]
        header = _HEADER.pack(
            _MAGIC,
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

    def read(self, number: int, into: npt.NDArray[np.uint8]) -> tuple[int, ...] | None:
        """Read the activation of one entry.

        Args:
            number: of the entry.
            into: ``[activation_bytes]`` at least; what is behind the activation may be overwritten too.

        Returns:
            The shape of the activation without the batch dimension; None for a miss.
        """
        front = bytearray(_HEADER.size + self.manifest.field_bytes)
        try:
            count = os.preadv(self._entries, [front, into.data], number * self.manifest.slot_bytes)
            parts = self._checked(number, front[: _HEADER.size])
        except OSError:
            return None
        if parts is None:
            return None
        shape, length, _, checksum, _ = parts
        if count < len(front) + length or length > into.nbytes:
            return None
        return shape if xxhash.xxh3_64_intdigest(into[:length].data) == checksum else None

    def read_fields(self, number: int) -> bytes | None:
        """Read the other fields of the sample; None for a miss."""
        size = _HEADER.size + self.manifest.field_bytes
        try:
            front = os.pread(self._entries, size, number * self.manifest.slot_bytes)
            parts = self._checked(number, front[: _HEADER.size])
        except OSError:
            return None
        if parts is None:
            return None
        _, _, field_length, _, checksum = parts
        fields = front[_HEADER.size : _HEADER.size + field_length]
        return fields if len(fields) == field_length and xxhash.xxh3_64_intdigest(fields) == checksum else None

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
        self._files.append(os.open(self.folder / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW))
        return self._files[-1]

    def _checked(self, number: int, header: bytes | bytearray) -> tuple[tuple[int, ...], int, int, int, int] | None:
        """Shape, both lengths and both checksums of an entry, if its header is what the index says it is."""
        if len(header) != _HEADER.size:
            return None
        mark = _mark(header)
        if mark != self.index[number]:  # another process may have written it since the index was read
            written = os.pread(self._index, 4, number * 4)
            if len(written) != 4 or int.from_bytes(written, sys.byteorder) != mark:
                return None
            self.index[number] = mark
        magic, dimensions, *rest = _HEADER.unpack(header)
        length, field_length, written_number, checksum, field_checksum = rest[MAX_DIMENSIONS:]
        if magic != _MAGIC or dimensions > MAX_DIMENSIONS or written_number != number:
            return None
        if length > self.manifest.activation_bytes or field_length > self.manifest.field_bytes:
            return None
        return tuple(rest[:dimensions]), length, field_length, checksum, field_checksum


def read_manifest(folder: Path) -> Manifest:
    """What the store in ``folder`` holds.

    Raises:
        StoreError: there is none, or it is damaged.
    """
    try:
        file = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(file, encoding="utf-8") as stream:
            manifest = Manifest.from_json(stream.read(2**20))
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{folder}: {error}") from error
    if manifest.fingerprint != folder.name:
        raise StoreError(f"{folder} holds the store {manifest.fingerprint!r}")
    return manifest


def is_in_use(folder: Path) -> bool:
    """Whether a process has the store open."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def remove_store(folder: Path) -> bool:
    """Delete a store that no process has open; returns whether it is gone."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        drafts = [file.name for file in folder.glob(f"{MANIFEST}.*")]
        for name in (MANIFEST, *drafts, INDEX, ENTRIES, LOCK):  # without its manifest it is no store any longer
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _mark(header: bytes | bytearray) -> int:
    """What the index holds of an entry: never zero."""
    return xxhash.xxh3_64_intdigest(header) & 0xFFFFFFFF or 1
