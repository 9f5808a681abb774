"""What a dataset holds: labels, counters, generators and settings, as far as a bounded look shows."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

MAX_OBJECTS = 20_000
MAX_DEPTH = 6
MAX_ITEMS = 10_000  # of a list of objects; numbers and texts are read whole
MAX_BYTES = 2**28  # of one array; a larger one is sampled
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def digests_of(dataset: Any) -> dict[str, str]:
    """Return a digest of each attribute within reach of a dataset, by its path.

    It follows attributes, lists, tuples and dicts. It cannot see inside open files and objects of compiled extensions.

    >>> class Squares:
    ...     def __init__(self): self.targets, self.epoch = [0, 1, 4], 0
    >>> data = Squares()
    >>> before = digests_of(data)
    >>> data.targets[1] = 5
    >>> changed(before, digests_of(data))
    'targets[1]'
    """
    return {path: _digest(value) for path, value in _reach(dataset)}


def moving_of(dataset: Any) -> dict[str, str]:
    """Return a digest of each generator and each single number within reach of a dataset, by its path; quick.

    If loading a sample changes one, another load of the sample may return something else.
    """
    kinds = (*_GENERATORS, bool, int, float, complex)
    return {path: _digest(value) for path, value in _reach(dataset, items=16) if isinstance(value, kinds)}


def changed(before: dict[str, str], after: dict[str, str]) -> str | None:
    """Return the path of a value that differs; None if none does."""
    for path in before.keys() | after.keys():
        if before.get(path) != after.get(path):
            return path
    return None


def _reach(dataset: Any, items: int = MAX_ITEMS) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", dataset, 0)]
    while waiting and len(seen) < MAX_OBJECTS:
        path, value, depth = waiting.pop()
        if isinstance(value, _PLAIN):
            yield path, value
            continue
        if id(value) in seen or depth > MAX_DEPTH:
            continue
        seen[id(value)] = value
        if isinstance(value, (Tensor, np.ndarray, *_GENERATORS)) or _is_flat(value):
            yield path, value
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            yield f"{path}()", _described(value)
            cells = getattr(value, "__closure__", None) or ()
            inside = [cell.cell_contents for cell in cells if _is_filled(cell)]
            inside += [getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)]
            waiting += [(f"{path}()[{at}]", item, depth + 1) for at, item in enumerate(inside)]
        elif isinstance(value, (functools.partial, types.MethodType)):
            parts = (
                [value.func, value.args, value.keywords]
                if isinstance(value, functools.partial)
                else [value.__func__, value.__self__]
            )
            waiting += [(f"{path}()[{at}]", item, depth + 1) for at, item in enumerate(parts)]
        elif isinstance(value, (list, tuple)):
            yield f"{path}.len()", len(value)
            waiting += [(f"{path}[{at}]", item, depth + 1) for at, item in enumerate(value[:items])]
        elif isinstance(value, dict):
            yield f"{path}.len()", len(value)
            waiting += [(f"{path}[{key!r}]", value[key], depth + 1) for key in list(value)[:items]]
        elif not isinstance(value, (type, types.ModuleType)):
            yield f"{path}.__class__", type(value).__qualname__
            own = getattr(value, "__dict__", {})
            waiting += [(f"{path}.{name}".lstrip("."), item, depth + 1) for name, item in own.items()]


def _described(function: types.FunctionType | types.BuiltinFunctionType) -> str:
    code = getattr(function, "__code__", None)
    return (
        f"{function.__qualname__} {code.co_code.hex()} {code.co_consts!r} {code.co_names}" if code else repr(function)
    )


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is empty
        return False


def _is_flat(value: Any) -> bool:
    """Whether it is a list of many numbers or texts, such as labels or file names."""
    return isinstance(value, (list, tuple)) and len(value) > 16 and isinstance(value[0], _PLAIN)


def _digest(value: Any) -> str:
    state = xxhash.xxh3_64(type(value).__name__.encode())
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            return f"{id(value)} {value._version}"
        if value.dtype is torch.bfloat16:
            value = value.view(torch.int16)
        value = value.detach().resolve_conj().resolve_neg().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            state.update(repr(value.tolist()[:MAX_ITEMS]).encode())
        else:
            step = max(1, value.nbytes // MAX_BYTES)
            state.update(f"{value.shape} {value.dtype}".encode())
            state.update(np.ascontiguousarray(value[::step] if value.ndim else value).view(np.uint8).data)
    elif isinstance(value, np.random.Generator):
        state.update(repr(value.bit_generator.state).encode())
    elif isinstance(value, np.random.RandomState):
        state.update(repr(value.get_state(legacy=False)).encode())
    elif isinstance(value, random.Random):
        state.update(repr(value.getstate()).encode())
    elif isinstance(value, torch.Generator):
        state.update(value.get_state().numpy().data)
    else:
        state.update(repr(value).encode())
    return state.hexdigest()
