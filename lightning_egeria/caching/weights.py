"""What the output of a frozen front depends on beside its input: weights, buffers, modes and plain attributes."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_egeria.lazy.tape import version_of
from lightning_egeria.snapshots.digests import digest

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class FrontState:
    """Remembers the state of the modules of a frozen front, and compares it later.

    On the CPU it reads every weight, which costs little beside a forward pass. On a GPU it reads the version counters,
    which do not count writes through ``tensor.data``; `is_same` reads the values there too.

    Args:
        units: the modules that are left out, by path; their submodules count too.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        units = list(units)
        tops = {id(unit) for _, unit in units}
        found = {id(m): (f"{path}.{name}", m) for path, unit in units for name, m in unit.named_modules()}
        self._modules = list(found.values())
        # A module that trains may change its mode between training and validation; the mode is part of the key then.
        self._evaluating = [module for _, module in self._modules if not module.training]
        self._attributes = [
            (vars(m), name, list(value) if isinstance(value, list) else value)
            for _, m in self._modules
            for name, value in vars(m).items()
            if _is_attribute(name, value)
        ]
        self._classes = [(module, type(module)) for _, module in self._modules]
        self._forwards = [(vars(m), vars(m).get("forward")) for _, m in self._modules if id(m) not in tops]
        self._sizes = [(held, len(held)) for _, m in self._modules for held in (m._modules, m._parameters, m._buffers)]
        self._children = [(m._modules, name, child) for _, m in self._modules for name, child in m._modules.items()]
        # A look at the objects alone is quick; only where one is another one, values are compared.
        self._dicts = [held for held, _ in self._sizes]
        self._lists = [(held[name], value) for held, name, value in self._attributes if isinstance(value, list)]
        self._getters = []
        for _, module in self._modules:
            names = [name for name, value in vars(module).items() if _is_attribute(name, value)]
            names += ["training", "_modules", "_parameters", "_buffers"]
            self._getters.append((operator.itemgetter(*names), vars(module)))
        self._note()
        self._values = self._digest_of(self._held)

    def is_unchanged(self) -> bool:
        """Whether everything is the same; on a GPU, as far as version counters show."""
        if not self._has_same_objects():
            if not self._has_equal_objects():
                return False
            self._note_objects()
        return self._mark() == self._marked

    def _has_same_objects(self) -> bool:
        found = chain.from_iterable(map(dict.values, self._dicts))
        try:
            return (
                sum(map(len, self._dicts)) == len(self._objects)
                and all(map(operator.is_, found, self._objects))
                and [get(held) for get, held in self._getters] == self._plain
                and all(held.get("forward") is forward for held, forward in self._forwards)
                and all(type(module) is kind for module, kind in self._classes)
                and all(now == before for now, before in self._lists)
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or became a tensor or an array
            return False

    def _has_equal_objects(self) -> bool:
        """The same tensors, modules and classes, and attributes of the same values."""
        return not (
            any(held.get(name) is not tensor for held, name, tensor in self._held)
            or any(len(held) != size for held, size in self._sizes)
            or any(held.get("forward") is not forward for held, forward in self._forwards)
            or any(held.get(name) is not child for held, name, child in self._children)
            or any(type(module) is not kind for module, kind in self._classes)
            or any(held.get(name, _MISSING) != value for held, name, value in self._attributes)
            or any(module.training for module in self._evaluating)
        )

    def is_same(self) -> bool:
        """Whether everything is the same, value by value, though perhaps in other tensors; remembers these."""
        if self._digest_of(self._current()) != self._values:
            return False
        self._note()
        return self.is_unchanged()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers and plain attributes on exit, for runs that the program did not ask for."""
        found = [buffer for _, module in self._modules for buffer in module.buffers(recurse=False)]
        buffers = [(buffer, buffer.clone()) for buffer in found]
        attributes = [(vars(m), {k: v for k, v in vars(m).items() if _is_attribute(k, v)}) for _, m in self._modules]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    if not buffer.is_inference():
                        buffer.copy_(value)
            for held, plain in attributes:
                held.update(plain)

    @property
    def digest(self) -> bytes:
        """Digest of all weights, buffers, classes and plain attributes."""
        state = hashlib.blake2b(self._values, digest_size=16)
        state.update(repr([kind.__qualname__ for _, kind in self._classes]).encode())
        state.update(repr([(name, value) for _, name, value in self._attributes]).encode())
        return state.digest()

    def _note(self) -> None:
        self._held = self._current()
        self._tensors = [tensor for _, _, tensor in self._held]
        self._elsewhere = [tensor for tensor in self._tensors if tensor.device.type != "cpu"]
        self._objects: list[Any] = []  # so that values are compared first
        self._bytes = [
            torch.as_strided(t.detach(), (t.numel(),), (1,)).view(torch.uint8).numpy().data
            for t in self._tensors
            if t.device.type == "cpu" and t.numel() and torch.ops.aten.is_non_overlapping_and_dense(t)
        ]
        self._marked = self._mark()

    def _note_objects(self) -> None:
        self._objects = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._plain = [get(held) for get, held in self._getters]

    def _mark(self) -> tuple[list[tuple[int, bool]], list[int], int]:
        """Something that differs once a value was written, or a tensor needs a gradient."""
        versions = [version_of(tensor) for tensor in self._elsewhere]
        state = xxhash.xxh3_64()
        for values in self._bytes:
            state.update(values)
        return [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors], versions, state.intdigest()

    def _digest_of(self, held: list[tuple[dict[str, Any], str, Tensor]]) -> bytes:
        return digest({f"{at} {name}": tensor for at, (_, name, tensor) in enumerate(held)})

    def _current(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Weights and buffers by name, as they are now."""
        return [
            (held, name, tensor)
            for _, module in self._modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]


_MISSING = object()


def _is_attribute(name: str, value: Any) -> bool:
    """Whether it is a number or text that a module holds, such as ``eps`` and ``padding_mode``."""
    if name == "training":
        return False
    if isinstance(value, (tuple, list)):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)
