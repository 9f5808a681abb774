"""Noticing that code changes the attributes of a module."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class Attributes:
    """The attributes of a module at one moment, with the items of lists and dictionaries and the versions of tensors.

    >>> net = nn.Module()
    >>> net.seen = []
    >>> before = Attributes(net)
    >>> net.seen.append(1)
    >>> before.restore(), net.seen
    (['seen'], [])
    """

    def __init__(self, module: nn.Module) -> None:
        self._own, self._values = vars(module), dict(vars(module))
        self._held = {name: copy.copy(value) for name, value in self._values.items() if isinstance(value, (list, dict))}
        self._marks = {name: _mark(value) for name, value in self._values.items()}

    def restore(self) -> list[str]:
        """Return to that moment, except for the values of tensors, and return the names of what had changed."""
        changed = [name for name in {**self._own, **self._values} if self._is_changed(name)]
        for name in changed:
            if name not in self._values:
                del self._own[name]
                continue
            value = self._own[name] = self._values[name]
            if name in self._held:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(self._held[name])
        return changed

    def _is_changed(self, name: str) -> bool:
        if name not in self._own or name not in self._values or self._own[name] is not self._values[name]:
            return True
        return bool(_mark(self._own[name]) != self._marks[name])


def _mark(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, id(item), _version(item)) for key, item in value.items()]
    return [(id(item), _version(item)) for item in value] if isinstance(value, list) else _version(value)


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None
