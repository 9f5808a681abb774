"""Boundary activations on disk: one slot of fixed size for each entry, and an index of what is there.

A store is a folder of three files. ``manifest.json`` says what the entries are; ``entries`` holds one slot per entry,
at ``number * slot_bytes``: a header with the lengths and checksums, the other fields of the sample, the activation;
``index`` holds four bytes per entry, written last: a part of the header's checksum, or zero. An entry counts only where
index, header and data agree, so one that is absent, torn, changed or of another store is a miss and never an error.
What is read is not believed: no allocation is larger than the file that asks for it, and links are not followed.

Slots that were not written take no room on a file system with sparse files. Several processes may read and write one
store: whoever writes an entry writes the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

try:
    import fcntl
except ImportError as error:  # Windows
    raise ImportError("the cache of the frozen prefix needs a POSIX system, such as Linux or macOS") from error

FORMAT = 3
MANIFEST, ENTRIES, INDEX, LOCK = "manifest.json", "entries", "index", "lock"
MAX_DIMENSIONS = 6
MAX_ENTRIES = 2**28  # an index of 1 GiB, which is held in memory
MAX_SLOT_BYTES = 2**31 - 2**12  # what one call of the system reads or writes
MAX_MANIFEST_BYTES = 2**16
LOCK_PATIENCE_S = 1.0  # with those who look whether a store is in use, which takes them no time
# name of the store, dimensions, shape, bytes of the activation, bytes of the fields, number of the entry, checksums of
# both parts
_HEADER = struct.Struct(f"<QQ{MAX_DIMENSIONS}QQQQQQ")
_ALIGNMENT = 64
_VALUE_BYTES = {str(dtype): dtype.itemsize for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_Parts = tuple[tuple[int, ...], int, int, int, int]  # shape, both lengths and both checksums of an entry


class StoreError(Exception):
    """The store cannot be read or written as it is; the message says why."""


class StoreBusyError(StoreError):
    """Another process is about to delete the store, or does not let go of it."""


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
            if version != FORMAT:
                raise StoreError(
                    f"the store has format {version!r:.20}, this version of lightning_egeria reads {FORMAT}"
                )
            about = {_printable(key): _printable(value) for key, value in state["about"].items()}
            manifest = cls(**{**state, "order": tuple(state["order"]), "about": about})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(f"{MANIFEST} is not that of a store: {error!r:.200}") from error
        manifest.check()
        return manifest

    def check(self) -> None:
        """See that a store can be like this.

        Raises:
            StoreError: it cannot.
        """
        numbers = (self.entries, self.activation_bytes, self.field_bytes, *self.order)
        sound = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        sound = sound and type(self.dtype) is str and type(self.fingerprint) is str and self.fingerprint.isascii()
        if not sound or not self.fingerprint.isalnum() or self.dtype not in _VALUE_BYTES:
            raise StoreError(f"{MANIFEST} says what no store can be")
        dimensions = len(self.order) - 1  # without that of the batch
        if self.entries > MAX_ENTRIES or self.slot_bytes > MAX_SLOT_BYTES or dimensions > MAX_DIMENSIONS:
            raise StoreError(
                f"{self.entries} entries of {self.slot_bytes} bytes with {dimensions} dimensions are more than "
                f"a store can hold: {MAX_ENTRIES} of {MAX_SLOT_BYTES} bytes with {MAX_DIMENSIONS}"
            )


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
        self._value_bytes = _VALUE_BYTES[self.manifest.dtype]
        self.index = np.zeros(0, np.uint32)
        self._files: list[int] = []
        try:
            # A shared lock for as long as it is open: `remove_store` leaves it alone.
            self._lock = self._open(LOCK, os.O_RDWR)
            _share(self._lock, folder)
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
            _check_folder(folder)
            for name, size in ((LOCK, 0), (ENTRIES, 0), (INDEX, manifest.entries * 4)):
                # Another process may be doing the same: what exists is left as it is, and only ever extended.
                file = _open_file(folder / name, os.O_RDWR | os.O_CREAT)
                try:
                    if os.fstat(file).st_size < size:
                        os.ftruncate(file, size)
                finally:
                    os.close(file)
            if not (folder / MANIFEST).exists():
                draft = folder / f"{MANIFEST}.{os.getpid()}"
                file = _open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                with os.fdopen(file, "w", encoding="utf-8") as stream:
                    stream.write(manifest.to_json())
                _put_in_place(draft, folder / MANIFEST)
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
        header = _HEADER.pack(
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
        size = _HEADER.size + self.manifest.field_bytes
        if not self._reaches(number, size):
            return None
        front = bytearray(size)
        try:
            count = os.preadv(self._entries, [front, into.data], number * self.manifest.slot_bytes)
            parts = self._checked(number, front[: _HEADER.size])
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
        size = _HEADER.size + self.manifest.field_bytes
        if not self._reaches(number, size):
            return None
        try:
            front = os.pread(self._entries, size, number * self.manifest.slot_bytes)
            parts = self._checked(number, front[: _HEADER.size])
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
        self._files.append(_open_file(self.folder / name, flags))
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
        if len(header) != _HEADER.size:
            return None
        mark = _mark(header)
        if mark != self.index[number]:  # another process may have written it since the index was read
            written = os.pread(self._index, 4, number * 4)
            if len(written) != 4 or int.from_bytes(written, sys.byteorder) != mark:
                return None
            self.index[number] = mark
        name, dimensions, *rest = _HEADER.unpack(header)
        length, field_length, written_number, checksum, field_checksum = rest[MAX_DIMENSIONS:]
        if name != self._name or dimensions > MAX_DIMENSIONS or written_number != number:
            return None
        if length > self.manifest.activation_bytes or field_length > self.manifest.field_bytes:
            return None
        shape = tuple(rest[:dimensions])
        if math.prod(shape) * self._value_bytes != length:
            return None
        return shape, length, field_length, checksum, field_checksum


def read_manifest(folder: Path) -> Manifest:
    """What the store in ``folder`` holds.

    Raises:
        StoreError: there is none, or it is damaged.
    """
    try:
        _check_folder(folder)
        with os.fdopen(_open_file(folder / MANIFEST, os.O_RDONLY), "rb") as stream:
            manifest = Manifest.from_json(stream.read(MAX_MANIFEST_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{folder}: {error}") from error
    if manifest.fingerprint != folder.name:
        raise StoreError(f"{folder} holds the store {manifest.fingerprint!r:.80}")
    return manifest


def is_in_use(folder: Path) -> bool:
    """Whether a process has the store open."""
    try:
        _check_folder(folder)
        lock = _open_file(folder / LOCK, os.O_RDWR)
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
        _check_folder(folder)
        lock = _open_file(folder / LOCK, os.O_RDWR)
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


def _share(lock: int, folder: Path) -> None:
    """Lock for reading and writing beside others.

    Raises:
        StoreBusyError: another process has it for itself.
    """
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() - began > LOCK_PATIENCE_S:
                raise StoreBusyError(f"{folder} is locked by another process") from error
            time.sleep(0.002)


def _put_in_place(draft: Path, file: Path) -> None:
    """Give the draft its name, unless another process was faster: a store has one manifest from then on."""
    try:
        os.link(draft, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        draft.replace(file)
    draft.unlink(missing_ok=True)


def _check_folder(folder: Path) -> None:
    """See that it is a folder, and nobody else's.

    Raises:
        OSError: it is not, or cannot be looked at.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "it is no folder, or a link to one")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise OSError(errno.EPERM, "it belongs to another user, or others may write to it")


def _open_file(path: Path, flags: int) -> int:
    """Open a file, and make it for its user only.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or a device.
    """
    # Without waiting: a pipe would be opened once somebody opens its other end.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, f"{path.name} is no file")


def _printable(text: str) -> str:
    """A text without what a terminal would obey.

    Raises:
        TypeError: it is no text.
    """
    if type(text) is not str:
        raise TypeError(f"a text is expected, not {type(text).__name__}")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _mark(header: bytes | bytearray) -> int:
    """What the index holds of an entry: never zero."""
    return xxhash.xxh3_64_intdigest(header) & 0xFFFFFFFF or 1


def _fields(front: bytes | bytearray, parts: _Parts) -> bytes | None:
    """The fields of an entry behind its header; None: they are damaged."""
    _, _, length, _, checksum = parts
    fields = bytes(front[_HEADER.size : _HEADER.size + length])
    return fields if len(fields) == length and xxhash.xxh3_64_intdigest(fields) == checksum else None
