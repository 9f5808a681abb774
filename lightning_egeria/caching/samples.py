"""What a sample is made of: its fields as leaves, and leaves as bytes. Nothing here runs code that it reads."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_KINDS = _TENSOR, _ARRAY, _BYTES, _PLAIN, _STAND_IN = "tensor", "array", "bytes", "plain", "stand-in"


class StandIn(NamedTuple):
    """Stands for a tensor, an array or a list of numbers that was not loaded: NaN, or zeros where there is no NaN."""

    shape: tuple[int, ...]
    dtype: str
    kind: str

    @classmethod
    def of(cls, leaf: Tensor | np.ndarray | list[Any]) -> StandIn:
        """The stand-in of ``leaf``."""
        if isinstance(leaf, list):
            return cls((len(leaf),), "", _PLAIN)
        if isinstance(leaf, np.ndarray):
            return cls(leaf.shape, leaf.dtype.str, _ARRAY)
        return cls(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), _TENSOR)

    def leaf(self) -> Tensor | np.ndarray | list[Any]:
        """What stands there; tensors and arrays take no memory."""
        if self.kind == _PLAIN:
            return [0] * self.shape[0]
        if self.kind == _ARRAY:
            dtype = np.dtype(self.dtype)
            return np.broadcast_to(np.array(np.nan if dtype.kind in "fc" else 0, dtype), self.shape)
        return stand_in_tensor(self.shape, _torch_dtype(self.dtype))


def stand_in_tensor(
    shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """A tensor of one element, seen in ``shape``: NaN, or zeros in a dtype that has no NaN."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def leaves_of(sample: Any) -> Iterator[Any]:
    """What stands in the nested dicts, lists, tuples and named tuples of a sample, in order; a list of numbers is one.

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


def same_leaf(first: Any, second: Any) -> bool:
    """Whether two leaves are of one type and, bit for bit, of one value.

    Raises:
        TypeError: their type cannot be compared.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return bool(first.dtype == second.dtype and torch.equal(bits_of(first), bits_of(second)))
    if isinstance(first, np.ndarray) and first.dtype != object:
        return first.dtype == second.dtype and first.shape == second.shape and bool(first.tobytes() == second.tobytes())
    try:
        return bool(first == second) or (first != first and second != second)
    except Exception as error:  # whatever the user's own type raises
        raise TypeError(f"two values of type {type(first).__name__} cannot be compared") from error


def encode(leaves: list[Any]) -> bytes:
    """The leaves as bytes; `decode` is the inverse.

    Raises:
        TypeError: a leaf is neither a tensor, an array, a number, a list of numbers, a text, bytes, None nor a
            `StandIn`.
    """
    described: list[list[Any]] = []
    blobs: list[bytes] = []
    for leaf in leaves:
        if isinstance(leaf, StandIn):
            described.append([_STAND_IN, list(leaf.shape), leaf.dtype, leaf.kind])
        elif type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized:
            blobs.append(bytes_of(leaf))
            described.append([_TENSOR, list(leaf.shape), str(leaf.dtype).removeprefix("torch.")])
        elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "?biufcSU":
            blobs.append(leaf.tobytes())
            described.append([_ARRAY, list(leaf.shape), leaf.dtype.str, isinstance(leaf, np.generic)])
        elif type(leaf) is bytes:
            blobs.append(leaf)
            described.append([_BYTES, len(leaf)])
        elif leaf is None or type(leaf) in (bool, int, float, str) or is_numbers(leaf):
            described.append([_PLAIN, leaf])
        else:
            raise TypeError(f"a field of type {type(leaf).__name__} cannot be kept on disk")
    head = json.dumps(described, separators=(",", ":")).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *blobs])


def decode(data: bytes) -> list[Any]:
    """The leaves that `encode` made ``data`` of.

    Raises:
        ValueError: ``data`` is not what `encode` makes.
    """
    end = 4 + int.from_bytes(data[:4], "little")
    leaves: list[Any] = []
    for part in _parts_of(data[4:end]):
        raw = data[end : end + part.size]
        if len(raw) != part.size:
            raise ValueError("not the fields of a sample: it is shorter than it says")
        end += part.size
        if part.kind == _BYTES:
            leaves.append(raw)
        elif part.kind == _TENSOR:
            tensor = torch.frombuffer(bytearray(raw), dtype=part.dtype) if raw else torch.empty(0, dtype=part.dtype)
            leaves.append(tensor.reshape(part.shape))
        elif part.kind == _ARRAY:
            array = np.frombuffer(bytearray(raw), part.dtype).reshape(part.shape)
            leaves.append(array[()] if part.value else array)
        else:
            leaves.append(list(part.value) if isinstance(part.value, list) else part.value)
    if end != len(data):
        raise ValueError("not the fields of a sample: the length is wrong")
    return leaves


class _Part(NamedTuple):
    kind: str
    size: int  # bytes behind the head
    dtype: Any = None
    shape: tuple[int, ...] = ()
    value: Any = None  # of what has no bytes; of an array, whether it is a number


@functools.lru_cache(maxsize=4096)
def _parts_of(head: bytes) -> tuple[_Part, ...]:
    """What the head of an encoded sample describes. Most samples of a dataset have the same."""
    parts = []
    try:
        for kind, *rest in json.loads(head):
            if kind == _PLAIN:
                parts.append(_Part(kind, 0, value=rest[0]))
            elif kind == _STAND_IN:
                parts.append(_Part(kind, 0, value=StandIn(tuple(rest[0]), rest[1], rest[2]).leaf()))
            elif kind == _BYTES:
                parts.append(_Part(kind, int(rest[0])))
            else:
                shape = tuple(map(int, rest[0]))
                dtype: Any = _torch_dtype(rest[1]) if kind == _TENSOR else np.dtype(rest[1])
                scalar = kind != _TENSOR and bool(rest[2])
                parts.append(_Part(kind, math.prod(shape) * dtype.itemsize, dtype, shape, scalar))
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"not the fields of a sample: {error}") from error
    if any(part.size < 0 or part.kind not in _KINDS for part in parts):
        raise ValueError("not the fields of a sample: it says what no sample can be")
    return tuple(parts)


def copy_of(leaf: Any) -> Any:
    """The leaf itself, or a copy of what could be changed in place; a stand-in cannot."""
    if isinstance(leaf, Tensor):
        return leaf if leaf.ndim and not any(leaf.stride()) else leaf.clone()
    if isinstance(leaf, np.ndarray):
        return leaf.copy() if leaf.flags.writeable else leaf
    return list(leaf) if isinstance(leaf, list) else leaf


def is_numbers(value: Any) -> bool:
    """Whether it is a list of numbers: the tokens of a text, say."""
    return type(value) is list and all(type(item) in (bool, int, float) for item in value)


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN equals NaN, and 0.0 differs from -0.0. A copy if it is not contiguous."""
    if not tensor.dtype.is_floating_point:
        return tensor.detach()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(integers[tensor.element_size()])


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor, row by row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not the fields of a sample: there is no dtype {name!r}")
    return dtype


def _is_named_tuple(sample: Any) -> bool:
    return isinstance(sample, tuple) and hasattr(sample, "_fields")
