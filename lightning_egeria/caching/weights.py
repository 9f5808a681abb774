"""What the output of a frozen front depends on beside its input: weights, buffers, modes and plain attributes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_egeria.caching.tape import version_of
from lightning_egeria.snapshots.digests import digest

_SAMPLED = 3  # values of each tensor, compared before each use
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class FrontState:
    """Remembers the state of the modules of a frozen front, and tells whether it is still the same.

    Args:
        units: the modules that are left out, by path; their submodules count too.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        found = {id(m): (f"{path}.{name}", m) for path, unit in units for name, m in unit.named_modules()}
        self._modules = list(found.values())
        self._evaluating = [module for _, module in self._modules if not module.training]
        self._note()
        self._values = self._digest()
        self._attributes = self._plain_attributes()

    def is_unchanged(self) -> bool:
        """Whether weights, buffers and modes are the same, as far as a look at each of them tells.

        It reads version counters and three values of each tensor on the CPU, in microseconds.
        """
        if not all(held.get(name) is tensor for held, name, tensor in self._held):
            return False
        if [version_of(tensor) for tensor in self._tensors] != self._versions:
            return False
        if any(module.training for module in self._evaluating):
            return False
        return self._sample() == self._sampled and not any(t.requires_grad for t in self._tensors)

    def is_same(self) -> bool:
        """Whether everything is the same, value by value, and remember it as the state to compare with."""
        if self._plain_attributes() != self._attributes or self._digest() != self._values:
            return False
        self._note()
        return not any(t.requires_grad for t in self._tensors)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers and plain attributes on exit, for runs that the program did not ask for."""
        buffers = [
            (buffer, buffer.clone(), version_of(buffer)) for _, m in self._modules for buffer in m.buffers(False)
        ]
        attributes = [(m, {k: v for k, v in vars(m).items() if _is_plain(v)}) for _, m in self._modules]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value, version in buffers:
                    if version_of(buffer) != version:
                        buffer.copy_(value)
            for module, plain in attributes:
                vars(module).update(plain)

    @property
    def digest(self) -> bytes:
        """Digest of all weights, buffers, modes and plain attributes."""
        state = hashlib.blake2b(self._values, digest_size=16)
        state.update(repr(self._attributes).encode())
        return state.digest()

    def _note(self) -> None:
        self._held: list[tuple[dict[str, Any], str, Tensor]] = []
        for _, module in self._modules:
            for held in (module._parameters, module._buffers):
                self._held += [(held, name, tensor) for name, tensor in held.items() if tensor is not None]
        self._tensors = [tensor for _, _, tensor in self._held]
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._views = [
            torch.as_strided(t.detach(), (t.numel(),), (1,)).view(torch.uint8).numpy()[:: _step(t)]
            for t in self._tensors
            if t.device.type == "cpu" and t.numel() and torch.ops.aten.is_non_overlapping_and_dense(t)
        ]
        self._sampled = self._sample()

    def _sample(self) -> bytes:
        return np.concatenate(self._views).tobytes() if self._views else b""

    def _digest(self) -> bytes:
        return digest({f"{at} {name}": tensor for at, (_, name, tensor) in enumerate(self._current())})

    def _current(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Weights and buffers by name, as they are now."""
        return [
            (held, name, tensor)
            for _, module in self._modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def _plain_attributes(self) -> list[tuple[str, str]]:
        """Numbers and texts that modules hold, such as ``eps`` and ``padding_mode``, and their classes."""
        found = []
        for path, module in self._modules:
            plain = {name: value for name, value in vars(module).items() if _is_plain(value) and name != "training"}
            found.append((path, f"{type(module).__qualname__} {sorted(plain.items(), key=lambda item: item[0])}"))
        return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _step(tensor: Tensor) -> int:
    """Bytes between two sampled ones: the highest byte of a number differs seldom, so an odd distance."""
    return max(1, tensor.numel() * tensor.element_size() // _SAMPLED - 1)
