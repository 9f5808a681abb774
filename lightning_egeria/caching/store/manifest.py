"""What a store holds, in words and numbers, and its folder: who may use it, and when it may be removed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import struct
from pathlib import Path

import torch

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.terminal import printable
from lightning_egeria.errors import StoreBusyError, StoreError

FORMAT = 3
MANIFEST, ENTRIES, INDEX, LOCK = "manifest.json", "entries", "index", "lock"
MAX_DIMENSIONS = 6
MAX_ENTRIES = 2**28  # an index of 1 GiB, which is held in memory
MAX_SLOT_BYTES = 2**31 - 2**12  # what one call of the system reads or writes
MAX_MANIFEST_BYTES = 2**16
LOCK_PATIENCE_S = 1.0  # with those who look whether a store is in use, which takes them no time
# name of the store, dimensions, shape, bytes of the activation, bytes of the fields, number of the entry, checksums of
# both parts
HEADER = struct.Struct(f"<QQ{MAX_DIMENSIONS}QQQQQQ")
_ALIGNMENT = 64
_NAME = "[0-9a-f]{32}"
_OLD_DRAFT = r"manifest\.json\.[0-9]+"  # of earlier versions
VALUE_BYTES = {str(dtype): dtype.itemsize for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


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
        return HEADER.size

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        size = HEADER.size + self.activation_bytes + self.field_bytes
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
            state = files.parsed_json(text)
            version = state.pop("format")
            if version != FORMAT:
                raise StoreError(
                    f"the store has format {version!r:.20}, this version of lightning_egeria reads {FORMAT}"
                )
            about = {_printable(key): _printable(value) for key, value in state["about"].items()}
            manifest = cls(**{**state, "order": tuple(state["order"]), "about": about})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
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
        if not sound or not self.fingerprint.isalnum() or self.dtype not in VALUE_BYTES:
            raise StoreError(f"{MANIFEST} has an impossible size, dtype or fingerprint")
        dimensions = len(self.order) - 1  # without that of the batch
        if self.entries > MAX_ENTRIES or self.slot_bytes > MAX_SLOT_BYTES or dimensions > MAX_DIMENSIONS:
            raise StoreError(
                f"{self.entries} entries of {self.slot_bytes} bytes with {dimensions} dimensions are more than "
                f"a store can hold: {MAX_ENTRIES} of {MAX_SLOT_BYTES} bytes with {MAX_DIMENSIONS}"
            )


def read_manifest(folder: Path) -> Manifest:
    """What the store in ``folder`` holds.

    Raises:
        StoreError: there is none, or it is damaged.
    """
    try:
        files.check_private(folder, links=False)
        manifest = Manifest.from_json(files.read_text(folder / MANIFEST, MAX_MANIFEST_BYTES, links=False))
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{folder}: {error}") from error
    if manifest.fingerprint != folder.name:
        raise StoreError(f"{folder} holds the store {manifest.fingerprint!r:.80}")
    return manifest


def is_store_name(name: str) -> bool:
    """Whether the folder of a store has such a name: a fingerprint."""
    return re.fullmatch(_NAME, name, re.ASCII) is not None


def is_in_use(folder: Path) -> bool:
    """Whether a process has the store open."""
    lock = _lock_of(folder)
    if lock is None:
        return False
    try:
        return not files.try_lock(lock)
    finally:
        os.close(lock)


def remove_store(folder: Path) -> bool:
    """Delete a store that no process has open; returns whether it is gone.

    Nothing is deleted of a folder without the name of a store, or that holds anything but the files of one.
    """
    lock = _lock_of(folder) if is_store_name(folder.name) else None
    if lock is None:
        return False
    try:
        if not files.try_lock(lock):
            return False
        found = {file.name for file in folder.iterdir()}
        drafts = {name for name in found if files.is_draft_of(name, MANIFEST) or re.fullmatch(_OLD_DRAFT, name)}
        if found - drafts - {MANIFEST, INDEX, ENTRIES, LOCK} or any((folder / name).is_dir() for name in found):
            return False
        # Without its manifest it is no store any longer.
        for name in (MANIFEST, *sorted(drafts), INDEX, ENTRIES, LOCK):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _lock_of(folder: Path) -> int | None:
    """The open lock file of a store; None without a store of this user's."""
    try:
        files.check_private(folder, links=False)
        return files.open_file(folder / LOCK, os.O_RDWR)
    except OSError:
        return None


def share(lock: int, folder: Path) -> None:
    """Lock for reading and writing beside others.

    Raises:
        StoreBusyError: another process has it for itself.
    """
    if not files.try_lock_within(lock, LOCK_PATIENCE_S):
        raise StoreBusyError(f"{folder} is locked by another process")


def _printable(text: str) -> str:
    """A text without what a terminal would obey.

    Raises:
        TypeError: it is no text.
    """
    if type(text) is not str:
        raise TypeError(f"a text is expected, not {type(text).__name__}")
    return printable(text)
