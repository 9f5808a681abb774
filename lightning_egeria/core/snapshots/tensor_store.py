"""Copies of tensors in host memory, shared between snapshots, and beyond a limit in files without a name."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO

import numpy as np
import torch
from torch import Tensor

from lightning_egeria.core.snapshots.digests import INTEGERS
from lightning_egeria.errors import SnapshotError, check_integers


class TensorStore:
    """Keeps copies of tensors for several snapshots.

    A tensor whose bits are those of its last copy shares it. Beyond ``most_bytes`` in memory, the copies that were not
    used for longest go to a temporary file. It has no name, so no other program can open it, and the system removes it
    even if the process is killed.

    Args:
        most_bytes: most bytes of copies in memory once a snapshot is complete.
        folder: where files are; None is the system's folder for temporary files.

    Raises:
        ArgumentError: if ``most_bytes`` is negative.

    >>> store, weight = TensorStore(most_bytes=0), torch.ones(2)
    >>> first, again = store.keep(weight), store.keep(weight)
    >>> first is again, store.memory_bytes
    (True, 8)
    >>> store.settle()
    >>> store.memory_bytes, store.file_bytes, first.values().tolist()
    (0, 8, [1.0, 1.0])
    """

    def __init__(self, most_bytes: int, folder: str | None = None) -> None:
        check_integers(0, most_bytes=most_bytes)
        self._most_bytes = most_bytes
        self._folder = folder
        self._clock = itertools.count()
        self._kept: weakref.WeakSet[KeptTensor] = weakref.WeakSet()
        self._last: dict[int, weakref.ref[KeptTensor]] = {}  # by identity of the tensor

    @property
    def memory_bytes(self) -> int:
        """Bytes of copies in memory."""
        return sum(kept.nbytes for kept in self._kept if kept.in_memory)

    @property
    def file_bytes(self) -> int:
        """Bytes of copies in files."""
        return sum(kept.nbytes for kept in self._kept if not kept.in_memory)

    def keep(self, tensor: Tensor) -> KeptTensor:
        """Return a copy of a tensor, or the last one if the bits are the same."""
        reference = self._last.get(id(tensor))
        last = reference() if reference is not None else None
        source = tensor.detach().cpu()
        if last is not None and last.in_memory and _same_bits(source, last.values()):
            return last
        kept = KeptTensor(source.clone() if tensor.device.type == "cpu" else source, self._clock)
        self._kept.add(kept)
        self._last[id(tensor)] = weakref.ref(kept)
        return kept

    def settle(self) -> None:
        """Move copies to a file until those in memory are within the limit.

        Raises:
            SnapshotError: if the file cannot be written.
        """
        surplus = self.memory_bytes - self._most_bytes
        if surplus <= 0:
            return
        moved: list[KeptTensor] = []
        for kept in sorted((one for one in self._kept if one.movable), key=lambda one: one.used):
            if surplus > 0:
                moved.append(kept)
                surplus -= kept.nbytes
        with _refused(sum(kept.nbytes for kept in moved), self._folder or tempfile.gettempdir()):
            file = _File(self._folder)
            for kept in moved:
                kept.move_to(file)
            file.stream.flush()
        self._last = {key: reference for key, reference in self._last.items() if reference() is not None}


class _File:
    """A temporary file that stays open while this object is referenced."""

    def __init__(self, folder: str | None) -> None:
        self.stream: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed below
        weakref.finalize(self, self.stream.close)


class KeptTensor:
    """A copy of a tensor, in host memory or in a file.

    Attributes:
        nbytes: its size.
        used: when it was used last; more is later.
    """

    def __init__(self, values: Tensor, clock: Iterator[int]) -> None:
        self._values: Tensor | None = values
        self._clock = clock
        self._file: _File | None = None
        self._offset = 0
        self._dtype, self._shape = values.dtype, values.shape
        self.movable = values.layout is torch.strided
        self.nbytes = values.nbytes if self.movable else 0
        self.used = next(clock)

    @property
    def in_memory(self) -> bool:
        """Whether it is in memory."""
        return self._values is not None

    def values(self) -> Tensor:
        """Return the values, in host memory; not to be changed.

        Raises:
            SnapshotError: if the file cannot be read.
        """
        self.used = next(self._clock)
        if self._values is not None:
            return self._values
        assert self._file is not None
        self._file.stream.seek(self._offset)
        data = np.fromfile(self._file.stream, np.uint8, self.nbytes)
        if data.nbytes < self.nbytes:
            raise SnapshotError(
                f"{self.nbytes} bytes of the state of training were written to a temporary file, and {data.nbytes} can "
                "be read. Check the disk"
            )
        return torch.from_numpy(data).view(self._dtype).view(self._shape)

    def move_to(self, file: _File) -> None:
        """Append the values to a file, and forget them."""
        assert self._values is not None
        self._offset = file.stream.seek(0, 2)
        self._values.contiguous().view(-1).view(torch.uint8).numpy().tofile(file.stream)
        self._file, self._values, self.movable = file, None, False


def _same_bits(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape and one.layout is other.layout is torch.strided
    if not alike or not (one.is_contiguous() and other.is_contiguous()):
        return False
    whole = INTEGERS[one.element_size()]
    return torch.equal(one.view(-1).view(whole), other.view(-1).view(whole))


@contextlib.contextmanager
def _refused(count: int, folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotError(
            f"{count} bytes of the state of training do not fit in memory, and cannot be written to {folder}: {error}. "
            "Set TMPDIR to a folder with more space, or allow more memory"
        ) from error
