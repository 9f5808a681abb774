"""What an object such as a dataset holds: labels, counters, generators and settings, as far as a bounded look shows."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import datetime
import enum
import functools
import itertools
import operator
import pathlib
import re
import types
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_egeria.core.snapshots.digests import has_values
from lightning_egeria.core.snapshots.random_state import GENERATORS, state_of

MAX_OBJECTS = 20_000
MAX_ITEMS = 10_000  # of a list of objects; numbers and texts are read whole
MOVING_OBJECTS, MOVING_ITEMS = 2000, 16  # the same for a look that is taken for each batch
MAX_BYTES = 2**28  # of one array; a larger one is sampled
# What cannot change, and is compared by its value. What an enumeration names is one of these, or the name is enough.
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(np.number, np.bool_, np.character, np.datetime64),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_VALUES = (*PLAIN, range, slice, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta)
_MEMORY = (bytearray, memoryview, array.array, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
_MOVING = (*GENERATORS, *_MEMORY, bool, int, float, complex, np.number, itertools.count)
_IN_PLACE = (Tensor, np.ndarray, *GENERATORS, *_MEMORY)
_FLOATS = (torch.float16, torch.float32, torch.float64)  # of numpy
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_NAMED = (type, types.BuiltinFunctionType)
_EMPTY = object()
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_TRAINER = ("lightning.pytorch.trainer", "pytorch_lightning.trainer")


def digests_of(
    value: Any,
    follows: Callable[[Any], bool] | None = None,
    most: int = MAX_OBJECTS,
    across_runs: bool = False,
    strict: bool = False,
) -> dict[str, str]:
    """Return a digest of each value within reach of an object, by its path.

    It follows attributes, containers, functions and what they are bound to. Of the Trainer it takes the number of the
    epoch, where it looks at the attributes of all objects. It cannot see inside open files, running generators and
    objects of compiled extensions.

    Args:
        value: the object.
        follows: whether to look at the attributes of an object; None looks at all.
        most: how many objects to look at.
        across_runs: whether a digest is the same in another run: then tensors on other devices are read, whose version
            counters tell within a run, and objects that are not looked at are named by their class.
        strict: if True, errors of an object that is read are raised; otherwise, such an object is compared by identity.

    >>> class Squares:
    ...     def __init__(self): self.targets, self.epoch = [0, 1, 4], 0
    >>> data = Squares()
    >>> before = digests_of(data)
    >>> data.targets[1] = 5
    >>> changed(before, digests_of(data))
    'targets[1]'
    """
    digest = _digest if strict else _digest_of_any
    found = _reach(value, follows=follows, most=most, strict=strict)
    return {path: digest(one, across_runs) for path, one in found}


class Contents:
    """The digests of what is within reach of an object, and a quick look whether any may have changed since.

    The look compares objects by identity: of each container, object and function within reach, what it holds must be
    the same objects. Only what changes in place and holds no objects, such as an array, is digested again.

    Args:
        value, follows, most, strict: as in `digests_of`.
        moving: look only for generators and single numbers, and at few objects; quick. If loading a sample changes
            one, another load of the sample may return something else.

    Attributes:
        digests: of each value within reach, by its path, as of `digests_of`.

    >>> data = [[0, 1], {"epoch": 1}]
    >>> contents = Contents(data)
    >>> contents.are_same()
    True
    >>> data[1]["epoch"] = 2
    >>> contents.are_same()
    False
    """

    def __init__(
        self,
        value: Any,
        follows: Callable[[Any], bool] | None = None,
        most: int = MAX_OBJECTS,
        strict: bool = False,
        moving: bool = False,
    ) -> None:
        digest = _digest if strict else _digest_of_any
        inside: list[Any] = []
        items = MOVING_ITEMS if moving else MAX_ITEMS
        most = MOVING_OBJECTS if moving else most
        found = list(_reach(value, items, follows, most, strict, inside))
        if moving:
            found = [(path, one) for path, one in found if isinstance(one, _MOVING)]
        self.digests = {path: digest(one) for path, one in found}
        self._lists: list[tuple[Any, list[Any]]] = []
        self._dicts: list[tuple[Any, list[Any], list[Any]]] = []
        self._objects: list[tuple[Any, type, Any]] = []  # with their dictionaries
        self._functions: list[tuple[types.FunctionType, list[Any]]] = []
        self._others: list[tuple[Any, type, list[Any]]] = []
        self._read: list[tuple[Any, str]] = []
        self._parts = functools.partial(_parts_of, items=items, follows=follows)
        self._digest = digest
        for path, one in found:
            if _is_flat(one) and all(isinstance(item, PLAIN) for item in one):
                inside.append(one)
            elif isinstance(one, (*_VALUES, *_NAMED)):
                continue
            elif isinstance(one, _IN_PLACE) or not hasattr(one, "__dict__"):  # another one is told by its identity
                self._read.append((one, self.digests[path]))
        for one in inside:
            self._note(one)

    def _note(self, one: Any) -> None:
        if isinstance(one, (tuple, types.MethodType)):
            return  # these cannot change
        if type(one) in (list, collections.deque):
            self._lists.append((one, list(one)))
        elif type(one) is dict:
            self._dicts.append((one, list(one), list(one.values())))
        elif isinstance(one, types.FunctionType):
            self._functions.append((one, _held_by(one)))
            self._note(vars(one))
        elif type(getattr(one, "__dict__", None)) is dict and not _has_own_parts(one):
            self._objects.append((one, type(one), one.__dict__))
            self._note(one.__dict__)
        else:
            self._others.append((one, type(one), [part for _, part in self._parts(one) or ()]))

    def are_same(self) -> bool:
        """Whether surely nothing has changed; an object in the place of an equal one counts as a change."""
        same = operator.is_
        try:
            return (
                all(len(one) == len(held) and all(map(same, one, held)) for one, held in self._lists)
                and all(
                    len(one) == len(held) and all(map(same, one.values(), held)) and list(one) == keys
                    for one, keys, held in self._dicts
                )
                and all(type(one) is kind and one.__dict__ is held for one, kind, held in self._objects)
                and all(all(map(same, _held_by(one), held)) for one, held in self._functions)
                and all(
                    type(one) is kind and _are_same([part for _, part in self._parts(one) or ()], held)
                    for one, kind, held in self._others
                )
                and all(self._digest(one) == digest for one, digest in self._read)
            )
        except Exception:  # the user's classes may raise anything
            return False


def _held_by(function: types.FunctionType) -> list[Any]:
    """What a function holds."""
    cells = [cell.cell_contents if _is_filled(cell) else _EMPTY for cell in function.__closure__ or ()]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__, *cells]


def _has_own_parts(value: Any) -> bool:
    """Whether an object with attributes holds more than these."""
    kinds = (dict, list, tuple, set, frozenset, collections.deque, functools.partial, SynchronizedBase)
    return isinstance(value, kinds) or type(value).__module__.startswith(_TRAINER) or bool(slots_of(value))


def _are_same(parts: list[Any], held: list[Any]) -> bool:
    """Whether the parts of an object are the same, or numbers and texts of the same values."""

    def is_text(one: Any) -> bool:
        return type(one) in (int, str) or (type(one) is list and all(type(item) is str for item in one))

    return len(parts) == len(held) and all(
        one is other or (is_text(one) and is_text(other) and one == other)
        for one, other in zip(parts, held, strict=True)
    )


def changed(before: dict[str, str], after: dict[str, str]) -> str | None:
    """Return the path of a value that differs; None if none does."""
    for path in before.keys() | after.keys():
        if before.get(path) != after.get(path):
            return path
    return None


def _reach(
    root: Any,
    items: int = MAX_ITEMS,
    follows: Callable[[Any], bool] | None = None,
    most: int = MAX_OBJECTS,
    strict: bool = False,
    inside: list[Any] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield what is looked at as one value, by its path; all other objects within reach are added to ``inside``."""
    parts_of = _parts_of if strict else _parts_of_any
    seen: dict[int, Any] = {}
    waiting = collections.deque[tuple[str, Any]]([("", root)])
    while waiting:  # what is near comes first
        path, value = waiting.popleft()
        if isinstance(value, _VALUES):
            yield path, value
            continue
        if id(value) in seen:
            continue
        if len(seen) == most:
            if strict:
                raise ValueError(f"there are more than {most} objects")
            return
        seen[id(value)] = value
        parts = None if isinstance(value, (Tensor, np.ndarray, *GENERATORS)) else parts_of(value, items, follows)
        if parts is None:
            yield path, value
            continue
        if inside is not None:
            inside.append(value)
        if not isinstance(value, types.FunctionType):
            yield f"{path}.__class__", type(value).__qualname__
        waiting += [(f"{path}{name}".removeprefix("."), item) for name, item in parts]


def _parts_of_any(value: Any, items: int, follows: Callable[[Any], bool] | None) -> list[tuple[str, Any]] | None:
    try:
        return _parts_of(value, items, follows)
    except Exception:  # the user's classes may raise anything
        return None


def _parts_of(value: Any, items: int, follows: Callable[[Any], bool] | None) -> list[tuple[str, Any]] | None:
    """What an object holds, by the end of its path; None if it is looked at as one value."""
    if _is_flat(value) or isinstance(value, _MEMORY):
        return None
    if isinstance(value, SynchronizedBase):  # shared with worker processes
        return [(".value", value.get_obj())]
    if isinstance(value, (set, frozenset)):
        return [("{}", sorted(map(repr, itertools.islice(value, items)))), (".len()", len(value))]
    if isinstance(value, (list, tuple, collections.deque)):
        return [(f"[{at}]", item) for at, item in enumerate(itertools.islice(value, items))] + [(".len()", len(value))]
    if isinstance(value, (dict, types.MappingProxyType)):
        found = [(f"[{key!r}]", value[key]) for key in itertools.islice(value, items)]
        return [*found, (".keys()", "".join(path for path, _ in found)), (".len()", len(value))]
    if isinstance(value, functools.partial):
        return [("()", value.func), ("().args", value.args), ("().keywords", value.keywords), ("", vars(value))]
    if isinstance(value, types.MethodType):
        return [("()", value.__func__), ("().self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inside = [*cells, value.__defaults__, value.__kwdefaults__, vars(value)]
        return [("()", code_of(value)), *((f"()[{at}]", item) for at, item in enumerate(inside))]
    if isinstance(value, (type, types.ModuleType)) or (follows is not None and not follows(value)):
        return None
    if type(value).__module__.startswith(_TRAINER):  # data may go by the epoch, and all else in it changes anyway
        epoch = getattr(value, "current_epoch", None) if follows is None else None
        return [] if epoch is None else [(".current_epoch", epoch)]
    own = {**slots_of(value), **(getattr(value, "__dict__", None) or {})}
    return [(f".{name}", item) for name, item in own.items()] if own or hasattr(value, "__dict__") else None


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are not in its dictionary."""
    found = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                with contextlib.suppress(AttributeError):  # it has no value
                    found[name] = getattr(value, name)
    return found


def code_of(function: types.FunctionType) -> str:
    """Return what a function does: its code and constants, and those of functions inside; without what it refers to."""
    return _described(function.__code__)


def _described(code: types.CodeType) -> str:
    constants = []
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            constants.append(_described(one))
        else:  # a set of texts has another order in each process
            constants.append(repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one))
    return f"{code.co_name} {code.co_code.hex()} {constants} {code.co_names}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is empty
        return False


def _is_flat(value: Any) -> bool:
    """Whether it is a list of many numbers or texts, such as labels or file names."""
    return isinstance(value, (list, tuple)) and len(value) > 16 and isinstance(value[0], PLAIN)


def _digest_of_any(value: Any, across_runs: bool = False) -> str:
    try:
        return _digest(value, across_runs)
    except Exception:  # the user's classes may raise anything
        return str(id(value))


def _digest(value: Any, across_runs: bool = False) -> str:
    state = xxhash.xxh3_64(type(value).__name__.encode())
    if isinstance(value, Tensor):
        if not has_values(value) or (value.device.type != "cpu" and not across_runs):
            return f"{id(value)} {0 if value.is_inference() else value._version}"
        value = value.detach().cpu().resolve_conj().resolve_neg()
        numpy_has_none = value.dtype.is_floating_point and value.dtype not in _FLOATS
        value = (value.view(_INTEGERS[value.element_size()]) if numpy_has_none else value).numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            state.update(repr(value.tolist()[:MAX_ITEMS]).encode())
        else:
            step = max(1, value.nbytes // MAX_BYTES)
            state.update(f"{value.shape} {value.dtype}".encode())
            state.update(np.ascontiguousarray(value[::step] if value.ndim else value).view(np.uint8).data)
    elif isinstance(value, torch.Generator):
        state.update(value.get_state().numpy().data)
    elif isinstance(value, GENERATORS):
        state.update(repr(state_of(value)).encode())
    elif isinstance(value, _MEMORY):
        state.update(bytes(value))
    elif isinstance(value, _NAMED):
        state.update(f"{value.__module__} {value.__qualname__}".encode())
    elif hasattr(value, "__dict__") and not isinstance(value, enum.Enum):  # it is not looked at
        state.update(str(type(value) if across_runs else id(value)).encode())
    else:
        try:
            state.update(_ADDRESS.sub("", repr(value)).encode())
        except Exception:  # a number of thousands of digits, or an object that cannot be shown
            state.update(str(id(value)).encode())
    return state.hexdigest()
