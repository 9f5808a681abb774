"""The attributes of modules, captured and restored: what a training step may leave behind besides parameters."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import copy
import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_egeria.core.snapshots.contents import PLAIN, slots_of
from lightning_egeria.core.snapshots.digests import has_values, same_bits
from lightning_egeria.core.snapshots.random_state import GENERATORS, set_state, state_of

_KEPT = ("_parameters", "_modules")  # other code owns them
# Not the user's own: their objects are restored by reference.
_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_egeria", "torchmetrics", "timm", "transformers"}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_CONTAINERS = (*_MAPPINGS, list, set, collections.deque)
_BASES = (collections.OrderedDict, dict, list, set, collections.deque, tuple)
_ARRAYS = (np.ndarray, bytearray, array.array)
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_Holder: TypeAlias = "dict[str, Any] | type | types.CellType | None"  # of globals, class attributes, closures
_CONSTANTS = {*PLAIN, torch.Size}


class ModuleAttributes:
    """The attributes and buffers of a module and its submodules at one moment. `restore` returns to it.

    Numbers, tensors, arrays, random generators, and lists, dictionaries, sets, tuples, deques and namespaces of them
    return to their values: counters, running statistics, the states of torchmetrics, lists of outputs. So do modules
    that are no submodules, with their parameters, and objects of classes from the packages of the module and its
    submodules, such as a teacher in a list or averages of weights. Tensors and containers keep their identity. Other
    objects, data sets and iterators among them, are restored by reference only, so a change inside one stays. The
    module's own parameters and submodules are left alone.

    Args:
        module: the module.
        without: names of attributes to leave alone.

    >>> norm = nn.BatchNorm1d(2)
    >>> norm.seen = []
    >>> before = ModuleAttributes(norm)
    >>> norm.seen.append(norm(torch.randn(4, 2)))
    >>> before.restore()
    >>> norm.seen, norm.running_mean.tolist()
    ([], [0.0, 0.0])
    """

    def __init__(self, module: nn.Module, without: Sequence[str] = ()) -> None:
        self._without = (*_KEPT, *without)
        parts = list(module.modules())
        known = _Known({type(part).__module__.partition(".")[0] for part in parts} - _LIBRARIES, {*map(id, parts)})
        self._attributes = [(part, _Attributes(vars(part), known, self._without)) for part in parts]

    def restore(self) -> None:
        """Return to the moment of the capture, any number of times."""
        done: set[int] = set()
        for part, attributes in self._attributes:
            attributes.restore(vars(part), done, self._without)


class ObjectAttributes:
    """The attributes of an object that is no module, as `ModuleAttributes` keeps them.

    Args:
        owner: the object.
        parts: identities of objects of which a reference is kept.
        without: names of attributes to leave alone.
    """

    def __init__(self, owner: Any, parts: set[int], without: Sequence[str]) -> None:
        self._owner, self._without = owner, without
        known = _Known({type(owner).__module__.partition(".")[0]} - _LIBRARIES, parts)
        self._attributes = _Attributes(vars(owner), known, without)

    def restore(self) -> None:
        """Return to the moment of the capture, any number of times."""
        self._attributes.restore(vars(self._owner), set(), self._without)


class CodeValues:
    """Values outside of modules that their code may change, at one moment. `restore` returns to it.

    Follows methods of each module to the functions, methods and classes that they name, as long as these belong to the
    packages of the modules, and keeps the globals, closure variables, defaults and class attributes that this code
    names: counters, schedules, caches. Values are kept as `ModuleAttributes` keeps them. A global that the code creates
    stays.

    Args:
        modules: the modules; their submodules count too.
        methods: names of the methods to follow.
    """

    def __init__(self, modules: Iterable[nn.Module], methods: Sequence[str] = ("forward",)) -> None:
        parts = [part for module in modules for part in module.modules()]
        self._known = _Known(
            {type(part).__module__.partition(".")[0] for part in parts} - _LIBRARIES, {*map(id, parts)}
        )
        self._kept: list[tuple[_Holder, str, _Kept]] = []
        self._seen: set[tuple[int, type | None]] = set()
        for kind in {type(part) for part in parts}:
            for name in methods:
                self._follow(getattr(kind, name, None), kind)
        for part in parts:
            self._follow(vars(part).get("forward"), type(part))

    def restore(self) -> None:
        """Return to the moment of the capture, any number of times."""
        done: set[int] = set()
        for holder, name, kept in self._kept:
            value = kept.restored(done)
            if isinstance(holder, dict):
                holder[name] = value
            elif isinstance(holder, type) and vars(holder).get(name) is not value:
                setattr(holder, name, value)
            elif isinstance(holder, types.CellType):
                holder.cell_contents = value

    def _follow(self, value: Any, owner: type | None) -> None:
        """Follow a function or a class to what its code names.

        Args:
            value: anything; other values have no code.
            owner: class whose attributes the code reaches through ``self``.
        """
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if not isinstance(function, types.FunctionType) or (id(function), owner) in self._seen:
            return
        if function.__module__.partition(".")[0] not in self._known.packages:
            return
        self._seen.add((id(function), owner))
        names = _names_in(function.__code__)
        for name in names & function.__globals__.keys():
            self._keep(function.__globals__, name, function.__globals__[name], names)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                self._keep(cell, "", cell.cell_contents, names)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._keep(None, "", default, names)
        self._look_into(owner, names)

    def _look_into(self, kind: type | None, names: set[str]) -> None:
        """Keep or follow the attributes of a class that code names."""
        own = () if kind is None else kind.__mro__
        for base in own:
            if base.__module__.partition(".")[0] in self._known.packages:
                for name in names & vars(base).keys():
                    value = vars(base)[name]
                    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
                    if isinstance(value, types.FunctionType):
                        self._follow(value, kind)
                    else:
                        self._keep(base, name, value, set())

    def _keep(self, holder: _Holder, name: str, value: Any, names: set[str]) -> None:
        kind = value if isinstance(value, type) else type(value)
        self._look_into(kind, names | {"__init__", "__call__", "forward"})
        if isinstance(value, types.FunctionType):
            self._follow(value, None)
        elif not isinstance(value, type | types.ModuleType):
            self._kept.append((holder, name, _Kept.of(value, self._known)))


def _names_in(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function and the functions that it defines."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


class _Known:
    """What is captured already, and where objects come from that are captured with their attributes.

    Attributes:
        packages: names of the packages of the user's modules.
        parts: identities of objects that are captured elsewhere.
        kept: captured values, by identity.
    """

    def __init__(self, packages: set[str], parts: set[int]) -> None:
        self.packages = packages
        self.parts = parts
        self.kept: dict[int, _Kept] = {}

    def has_attributes(self, value: Any) -> bool:
        """Whether a value is an object whose attributes training may change."""
        if id(value) in self.parts or isinstance(value, type | types.ModuleType | Dataset | DataLoader):
            return False
        own = isinstance(value, (nn.Module, *_HOLDERS)) or type(value).__module__.partition(".")[0] in self.packages
        has_some = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
        return own and has_some and not hasattr(type(value), "__get__")


class _Attributes:
    """The attributes of one object. Most are constants or empty; these take the fast path."""

    __slots__ = ("empty", "kept", "values")

    def __init__(
        self, own: Mapping[str, Any], known: _Known, without: Sequence[str] = (), outside: Sequence[str] = ()
    ) -> None:
        self.values = dict(own)
        for name in without:
            self.values.pop(name, None)
        others = [(name, value) for name, value in self.values.items() if not _is_constant(value)]
        self.empty = [value for _, value in others if type(value) in _CONTAINERS and not value]
        self.kept = {
            name: _Kept.of(value, known, name in outside)
            for name, value in others
            if type(value) not in _CONTAINERS or value
        }

    def restore(self, own: dict[str, Any], done: set[int], without: Sequence[str] = ()) -> None:
        """Return to these attributes in the dictionary of the object."""
        own |= self.values
        if len(own) > len(self.values):
            for name in own.keys() - self.values.keys() - {*without}:
                del own[name]
        for value in filter(None, self.empty):  # it is no longer
            value.clear()
        for name, kept in self.kept.items():
            own[name] = kept.restored(done)


def constants_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain: numbers, texts, None.

    >>> constants_of(types.SimpleNamespace(seen=3, samples=[1, 2]))
    {'seen': 3}
    """
    return {name: one for name, one in vars(value).items() if _is_constant(one)}


def put_back(held: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Give a dictionary its items back, in their order; past methods of the user's class."""
    kind = _base_of(held)
    if not _are_same(chain.from_iterable(kind.items(held)), chain.from_iterable(items.items())):
        kind.clear(held)  # else other code may be iterating over it, as torch over hooks
        kind.update(held, items)


def _are_same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return [*map(id, first)] == [*map(id, second)]


def _is_constant(value: Any) -> bool:
    kind = type(value)
    return kind in _CONSTANTS or (kind is tuple and all(map(_is_constant, value)))


class _Kept:
    """A value, and what it holds: a copy of a tensor's values, the items of a container, attributes of an object."""

    __slots__ = ("attributes", "held", "slots", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held: Any = None
        self.attributes: _Attributes | None = None
        self.slots: dict[str, _Kept] = {}

    @classmethod
    def of(cls, value: Any, known: _Known, outside: bool = False) -> _Kept:
        """Capture a value.

        Args:
            value: the value.
            known: what was captured before.
            outside: whether it belongs to a module that is no part of the captured one, so its parameters count.
        """
        if _is_constant(value):
            return cls(value)
        is_tensor = isinstance(value, Tensor)
        if not is_tensor and isinstance(value, GENERATORS):
            kept = cls(value)
            kept.held = state_of(value)
            return kept
        if isinstance(value, _ARRAYS):
            kept = cls(value)
            kept.held = copy.copy(value)
            return kept
        is_container = isinstance(value, (*_CONTAINERS, tuple))
        is_object = not is_tensor and type(value) not in _CONTAINERS and known.has_attributes(value)
        if not (is_tensor or is_container or is_object):
            return cls(value)
        if id(value) in known.kept:
            return known.kept[id(value)]
        kept = known.kept[id(value)] = cls(value)  # before its items, which may refer to it
        if is_object:
            outside_parameters = ("_parameters",) if isinstance(value, nn.Module) else ()
            kept.attributes = _Attributes(getattr(value, "__dict__", {}), known, outside=outside_parameters)
            kept.slots = {name: cls.of(one, known) for name, one in slots_of(value).items()}
        if is_tensor:
            kept.held = value.detach().clone() if has_values(value) else None
            if isinstance(value, nn.Parameter) and not outside:
                kept.held = None
        elif isinstance(value, dict):
            kept.held = {key: cls.of(item, known, outside) for key, item in _base_of(value).items(value)}
        elif is_container:
            kept.held = [cls.of(item, known) for item in _base_of(value).__iter__(value)]
        return kept

    def restored(self, done: set[int]) -> Any:
        """Restore the value in place, once for each set of ``done``, and return it."""
        if id(self) in done or (self.held is None and self.attributes is None):
            return self.value
        done.add(id(self))
        if self.attributes is not None:
            self.attributes.restore(getattr(self.value, "__dict__", {}), done)
            for name, kept in self.slots.items():
                object.__setattr__(self.value, name, kept.restored(done))
        if self.held is None:
            return self.value
        if isinstance(self.value, Tensor):
            if not same_bits(self.value, self.held):  # else autograd would take it for changed
                with torch.inference_mode(self.value.is_inference()), torch.no_grad():
                    self.value.detach().copy_(self.held)
        elif isinstance(self.value, GENERATORS):
            set_state(self.value, self.held)
        elif isinstance(self.value, _ARRAYS):
            if not isinstance(self.value, np.ndarray):
                self.value[:] = self.held
            elif self.value.flags.writeable and self.value.shape == self.held.shape:
                self.value[...] = self.held
        elif isinstance(self.value, dict):
            put_back(self.value, {key: kept.restored(done) for key, kept in self.held.items()})
        else:
            values, base = [kept.restored(done) for kept in self.held], _base_of(self.value)
            if base is not tuple and not _are_same(base.__iter__(self.value), values):
                base.clear(self.value)
                (base.update if base is set else base.extend)(self.value, values)
        return self.value


def _base_of(container: Any) -> Any:
    """The class of a container whose methods are not the user's."""
    return next(base for base in _BASES if isinstance(container, base))
