"""The attributes of modules, captured and restored: what a training step may leave behind besides parameters."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn

_KEPT = ("_parameters", "_modules")  # other code owns them
_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.deque, collections.defaultdict)


class ModuleAttributes:
    """The attributes and buffers of a module and its submodules at one moment. `restore` returns to it.

    Numbers, tensors, and lists, dictionaries, sets, tuples and deques of them return to their values: counters,
    running statistics, the states of torchmetrics, lists of outputs. Tensors and containers keep their identity. Other
    objects are restored by reference only, so a change inside one stays. Parameters and submodules are left alone.

    Args:
        module: the module.

    >>> norm = nn.BatchNorm1d(2)
    >>> norm.seen = []
    >>> before = ModuleAttributes(norm)
    >>> norm.seen.append(norm(torch.randn(4, 2)))
    >>> before.restore()
    >>> norm.seen, norm.running_mean.tolist()
    ([], [0.0, 0.0])
    """

    def __init__(self, module: nn.Module) -> None:
        known: dict[int, _Kept] = {}
        self._attributes = [
            (part, {name: _Kept.of(value, known) for name, value in vars(part).items() if name not in _KEPT})
            for part in module.modules()
        ]

    def restore(self) -> None:
        """Return to the moment of the capture, any number of times."""
        done: set[int] = set()
        for part, attributes in self._attributes:
            own = vars(part)
            for name in [name for name in own if name not in attributes and name not in _KEPT]:
                del own[name]
            for name, kept in attributes.items():
                own[name] = kept.restored(done)


class _Kept:
    """A value, and what it holds: a copy of a tensor's values, or the items of a container."""

    __slots__ = ("held", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held: Any = None

    @classmethod
    def of(cls, value: Any, known: dict[int, _Kept]) -> _Kept:
        """Capture a value; ``known`` has those that were captured before, by identity."""
        is_tensor = isinstance(value, Tensor)
        if not is_tensor and type(value) not in (*_CONTAINERS, tuple):
            return cls(value)
        if id(value) in known:
            return known[id(value)]
        kept = known[id(value)] = cls(value)  # before its items, which may refer to it
        if is_tensor:
            kept.held = None if isinstance(value, nn.Parameter) else value.detach().clone()
        elif isinstance(value, dict):
            kept.held = {key: cls.of(item, known) for key, item in value.items()}
        else:
            kept.held = [cls.of(item, known) for item in value]
        return kept

    def restored(self, done: set[int]) -> Any:
        """Restore the value in place, once for each set of ``done``, and return it."""
        if self.held is None or id(self) in done:
            return self.value
        done.add(id(self))
        if isinstance(self.value, Tensor):
            with torch.inference_mode(self.value.is_inference()), torch.no_grad():
                self.value.detach().copy_(self.held)
        elif isinstance(self.value, dict):
            items = {key: kept.restored(done) for key, kept in self.held.items()}
            self.value.clear()
            self.value.update(items)
        else:
            values = [kept.restored(done) for kept in self.held]
            if isinstance(self.value, set):
                self.value.clear()
                self.value.update(values)
            elif not isinstance(self.value, tuple):
                self.value.clear()
                self.value.extend(values)
        return self.value
