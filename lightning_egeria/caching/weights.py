"""What the output of a frozen front depends on beside its input: weights, buffers, modes and plain attributes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_egeria.caching.tape import version_of
from lightning_egeria.snapshots.digests import digest

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class FrontState:
    """Remembers the state of the modules of a frozen front, and tells whether it is still the same.

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
        self._note()
        self._values = self._digest_of(self._held)

    def is_unchanged(self) -> bool:
        """Whether everything is the same; on a GPU, as far as a look without waiting for it tells."""
        if any(held.get(name) is not tensor for held, name, tensor in self._held):
            return False
        if any(len(held) != size for held, size in self._sizes):
            return False
        if any(held.get("forward") is not forward for held, forward in self._forwards):
            return False
        if any(held.get(name) is not child for held, name, child in self._children):
            return False
        if any(type(module) is not kind for module, kind in self._classes):
            return False
        if any(held.get(name, _MISSING) != value for held, name, value in self._attributes):
            return False
        if any(module.training for module in self._evaluating):
            return False
        if any(tensor.requires_grad for tensor in self._tensors):
            return False
        return self._mark() == self._marked

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
        self._views = [
            torch.as_strided(t.detach(), (t.numel(),), (1,)).view(torch.uint8).numpy()
            for t in self._tensors
            if t.device.type == "cpu" and t.numel() and torch.ops.aten.is_non_overlapping_and_dense(t)
        ]
        self._marked = self._mark()

    def _mark(self) -> tuple[list[int], list[int], int]:
        """Something that differs once a value was written."""
        places = [tensor.data_ptr() for tensor in self._tensors]
        versions = [version_of(tensor) for tensor in self._tensors if tensor.device.type != "cpu"]
        state = xxhash.xxh3_64()
        for view in self._views:
            state.update(view.data)
        return places, versions, state.intdigest()

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
