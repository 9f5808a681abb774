"""What a sample is made of: its fields as leaves, and leaves as bytes. Nothing here runs code that it reads."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_egeria.core.snapshots.digests import bytes_of

_TENSOR, _ARRAY, _BYTES, _PLAIN, _ABSENT, _OPAQUE = "tensor", "array", "bytes", "plain", "absent", "opaque"
_MAX_DIMENSIONS = 64  # of numpy
_CACHED_HEAD_BYTES = 1024
_MOST_HEAD_BYTES = 2**22  # what it describes takes up to thirty times as much memory
MEMORY_BYTES = 2**26  # for fields, in each process that loads samples
STAMP_BYTES = 8  # of the digest in front of them
_LEAF_BYTES = 300  # of a leaf in memory, beside its values
# Of tensors: what can be filled, compared and made of bytes. Quantised ones end the process when they are printed.
_TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
        *("float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
# Of arrays, as numpy writes them: byte order, kind, bytes or letters. Numpy itself reads whole expressions.
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,4}", re.ASCII)


class Opaque(NamedTuple):
    """Stands for a field of a type that is not kept, such as an image object; its sample is always loaded."""

    type_name: str


class Absent(NamedTuple):
    """Stands for a tensor of a sample that is not kept: what it looks like, and the digest of its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    digest: str

    @classmethod
    def of(cls, tensor: Tensor) -> Absent:
        """Describe a tensor."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), tensor.stride(), name, xxhash.xxh3_128_hexdigest(bytes_of(tensor)))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        return _torch_dtype(self.dtype)


def leaves_of(sample: Any) -> Iterator[Any]:
    """Yield the leaves of the nested dicts, lists, tuples and named tuples of a sample; a list of numbers is one leaf.

    They are numbered as by `torch.utils._pytree`, which would take several times as long for each sample.

    >>> list(leaves_of({"image": 1, "boxes": (2, (3, 4)), "text": "abc", "tokens": [7, 8]}))
    [1, 2, 3, 4, 'abc', [7, 8]]
    """
    if is_numbers(sample):
        yield sample
    elif type(sample) is dict:
        for value in sample.values():
            yield from leaves_of(value)
    elif type(sample) in (list, tuple) or _is_named_tuple(sample):
        for value in sample:
            yield from leaves_of(value)
    else:
        yield sample


def with_leaves(sample: Any, leaves: Iterator[Any]) -> Any:
    """A sample of the same structure with other leaves.

    >>> with_leaves({"image": None, "boxes": (None, None)}, iter([1, 2, 3]))
    {'image': 1, 'boxes': (2, 3)}
    """
    if is_numbers(sample):
        return next(leaves)
    if type(sample) is dict:
        return {key: with_leaves(value, leaves) for key, value in sample.items()}
    if type(sample) in (list, tuple):
        return type(sample)([with_leaves(value, leaves) for value in sample])
    if _is_named_tuple(sample):
        return type(sample)(*[with_leaves(value, leaves) for value in sample])
    return next(leaves)


def encode(leaves: list[Any]) -> bytes:
    """The leaves as bytes; `decode` is the inverse.

    A leaf that is neither a tensor, an array, a number, a list of numbers, a text, bytes, None nor `Absent` becomes
    `Opaque`.

    Raises:
        TypeError: a number is too large to be described.
    """
    described: list[list[Any]] = []
    blobs: list[bytes] = []
    for leaf in leaves:
        if isinstance(leaf, Absent):
            described.append([_ABSENT, list(leaf.shape), [list(leaf.stride), leaf.dtype], leaf.digest])
        elif type(leaf) is Tensor and leaf.layout is torch.strided and leaf.dtype in _TORCH_DTYPES.values():
            blobs.append(bytes_of(leaf))
            described.append([_TENSOR, list(leaf.shape), str(leaf.dtype).removeprefix("torch.")])
        elif isinstance(leaf, (np.ndarray, np.generic)) and _ARRAY_DTYPE.fullmatch(leaf.dtype.str):
            blobs.append(leaf.tobytes())
            described.append([_ARRAY, list(leaf.shape), leaf.dtype.str, isinstance(leaf, np.generic)])
        elif type(leaf) is bytes:
            blobs.append(leaf)
            described.append([_BYTES, len(leaf)])
        elif leaf is None or type(leaf) in (bool, int, float, str) or is_numbers(leaf):
            described.append([_PLAIN, leaf])
        else:
            described.append([_OPAQUE, leaf.type_name if isinstance(leaf, Opaque) else type(leaf).__qualname__])
    try:
        head = json.dumps(described, separators=(",", ":")).encode()
    except ValueError as error:  # a number of thousands of digits
        raise TypeError(f"a field cannot be kept on disk: {error}") from error
    if len(head) > _MOST_HEAD_BYTES:
        raise TypeError(f"a field cannot be kept on disk: its numbers and texts take {len(head)} bytes")
    return b"".join([len(head).to_bytes(4, "little"), head, *blobs])


def decode(data: bytes) -> list[Any]:
    """The leaves that `encode` made ``data`` of.

    Raises:
        ValueError: ``data`` is not what `encode` makes.
    """
    end = 4 + int.from_bytes(data[:4], "little")
    if end > 4 + _MOST_HEAD_BYTES:
        raise ValueError(f"not the fields of a sample: a description of {end - 4} bytes")
    head = data[4:end]
    leaves: list[Any] = []
    for part in _parts_of(head) if len(head) <= _CACHED_HEAD_BYTES else _parts_of.__wrapped__(head):
        raw = data[end : end + part.size]
        if len(raw) != part.size:
            raise ValueError("not the fields of a sample: it is shorter than it says")
        end += part.size
        if part.kind == _BYTES:
            leaves.append(raw)
        elif part.kind == _TENSOR:
            if part.dtype is torch.bool and raw.strip(b"\0\1"):
                raise ValueError("not the fields of a sample: neither true nor false")
            tensor = torch.frombuffer(bytearray(raw), dtype=part.dtype) if raw else torch.empty(0, dtype=part.dtype)
            leaves.append(tensor.reshape(part.shape))
        elif part.kind == _ARRAY:
            array = np.frombuffer(bytearray(raw), part.dtype).reshape(part.shape)
            leaves.append(_checked(array)[()] if part.value else _checked(array))
        else:
            leaves.append(list(part.value) if isinstance(part.value, list) else part.value)
    if end != len(data):
        raise ValueError("not the fields of a sample: the length is wrong")
    return leaves


def stamp_of(fields: bytes) -> int:
    """Return the digest of a sample's encoded fields."""
    return xxhash.xxh3_64_intdigest(fields)


def stamps_of(fields: bytes) -> tuple[int, int]:
    """Return the two stamps of an entry: a digest of the sample's fields, and one of the program's tensors for it.

    Args:
        fields: as in the store: 8 bytes of the second stamp, then the fields of the sample.
    """
    return stamp_of(fields[STAMP_BYTES:]), int.from_bytes(fields[:STAMP_BYTES], "little")


class FieldMemory:
    """Leaves of samples without their inputs, by the digest of their encoded fields, as far as there is room.

    Args:
        count: of leaves.
        inputs: numbers of the tensors that are absent.

    >>> memory, fields = FieldMemory(2, ()), encode([7, "cat"])
    >>> memory.get(stamp_of(fields), lambda: fields), memory.get(stamp_of(fields), lambda: b"")
    ([7, 'cat'], [7, 'cat'])
    """

    def __init__(self, count: int = 0, inputs: tuple[int, ...] = ()) -> None:
        self.form = count, inputs
        self._leaves: dict[int, list[Any]] = {}
        self._room = MEMORY_BYTES

    def get(self, stamp: int, read: Callable[[], bytes]) -> list[Any] | None:
        """Return the leaves, to be read or `copied`; None if the fields are gone, damaged or of another sample.

        Args:
            stamp: of the fields.
            read: returns the fields.
        """
        leaves = self._leaves.get(stamp)
        if leaves is None:
            fields = read()
            leaves = self._decoded(fields) if stamp_of(fields) == stamp else None
            if leaves is None:
                return None
            size = len(fields) + _LEAF_BYTES * len(leaves)
            if size <= self._room:  # samples come at random: those that are there serve as well as others
                self._leaves[stamp] = leaves
                self._room -= size
        return leaves

    def _decoded(self, fields: bytes) -> list[Any] | None:
        try:
            leaves = decode(fields)
        except ValueError:
            return None
        tensors = [leaf for leaf in leaves if type(leaf) in (Tensor, Absent)]
        absent = tuple(number for number, leaf in enumerate(tensors) if isinstance(leaf, Absent))
        known = (len(leaves), absent) == self.form and not any(isinstance(leaf, Opaque) for leaf in leaves)
        return leaves if known else None


def copied(leaf: Any) -> Any:
    """Return a leaf that the program may change."""
    if type(leaf) is Tensor:
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, (list, np.ndarray)) else leaf


def with_descriptions(leaves: list[Any]) -> list[Any]:
    """Return leaves with a description of each tensor behind them, for `without_inputs`."""
    return [*leaves, *(Absent.of(leaf) for leaf in leaves if type(leaf) is Tensor)]


def without_inputs(fields: bytes, inputs: Collection[int]) -> bytes:
    """Return encoded leaves with descriptions in the place of some tensors, which are counted among the tensors.

    Args:
        fields: encoded leaves `with_descriptions`; only these know the strides of the sample's tensors.
        inputs: numbers of the tensors.
    """
    found = decode(fields)
    absent = [leaf for leaf in found if isinstance(leaf, Absent)]
    leaves, count = found[: len(found) - len(absent)], itertools.count()
    return encode([absent[at] if type(leaf) is Tensor and (at := next(count)) in inputs else leaf for leaf in leaves])


class _Part(NamedTuple):
    kind: str
    size: int  # bytes behind the head
    dtype: Any = None
    shape: tuple[int, ...] = ()
    value: Any = None  # of what has no bytes; of an array, whether it is a number


@functools.lru_cache(maxsize=4096)
def _parts_of(head: bytes) -> tuple[_Part, ...]:
    """What the head of an encoded sample describes. Most samples of a dataset have the same."""
    try:
        parts = tuple(_part_of(*described) for described in json.loads(head))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not the fields of a sample: {error}") from error
    return parts


def _part_of(kind: str, first: Any, dtype: Any = "", last: Any = False) -> _Part:
    """One leaf of an encoded sample.

    Raises:
        ValueError: there is no such leaf.
    """
    if kind == _PLAIN and (first is None or type(first) in (bool, int, float, str) or is_numbers(first)):
        return _Part(kind, 0, value=first)
    if kind == _BYTES and type(first) is int and first >= 0:
        return _Part(kind, first)
    if kind == _OPAQUE and type(first) is str:
        return _Part(kind, 0, value=Opaque(first))
    if kind == _ABSENT and type(last) is str and len(dtype) == 2:
        shape, stride = _shape(first), tuple(dtype[0])
        fits = len(shape) == len(stride) and all(type(size) is int and 0 <= size < 2**48 for size in stride)
        if fits and dtype[1] in _TORCH_DTYPES:
            return _Part(kind, 0, value=Absent(shape, stride, dtype[1], last))
    if kind == _TENSOR:
        shape, known = _shape(first), _torch_dtype(dtype)
        return _Part(kind, math.prod(shape) * known.itemsize, known, shape)
    if kind == _ARRAY and _ARRAY_DTYPE.fullmatch(dtype) and type(last) is bool:
        shape, array_dtype = _shape(first), np.dtype(dtype)
        if not last or not shape:
            return _Part(kind, math.prod(shape) * array_dtype.itemsize, array_dtype, shape, last)
    raise ValueError("there is no such leaf")


def _shape(described: Any) -> tuple[int, ...]:
    shape = tuple(described)
    # The product of all but the zeros is what torch and numpy count with.
    fits = all(type(size) is int and size >= 0 for size in shape) and math.prod(size or 1 for size in shape) < 2**48
    if not fits or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("it has a shape that no sample can have")
    return shape


def _checked(array: np.ndarray) -> np.ndarray:
    """The array, unless it has values that numpy never makes: reading one of them raises, or worse.

    Raises:
        ValueError: it has.
    """
    if array.dtype.kind == "b" and (array.view(np.uint8) > 1).any():
        raise ValueError("not the fields of a sample: neither true nor false")
    if array.dtype.kind == "U" and (array.reshape(-1).view(array.dtype.byteorder + "u4") > 0x10FFFF).any():
        raise ValueError("not the fields of a sample: there is no such letter")
    return array


def is_numbers(value: Any) -> bool:
    """Whether it is a list of numbers: the tokens of a text, say."""
    return type(value) is list and all(type(item) in (bool, int, float) for item in value)


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype | None = _TORCH_DTYPES.get(str(name))
    if dtype is None:
        raise ValueError(f"there is no dtype {name!r:.40}")
    return dtype


def _is_named_tuple(sample: Any) -> bool:
    return isinstance(sample, tuple) and hasattr(sample, "_fields")
