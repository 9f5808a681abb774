"""The state of training, captured and restored within one process."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.core.snapshots.contents import PLAIN
from lightning_egeria.core.snapshots.module_attributes import ObjectAttributes, put_back
from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.core.snapshots.tensor_store import TensorStore

_KNOWN = ("state", "param_groups", "defaults")  # attributes of an optimizer that are kept by themselves or stay


class Stateful(Protocol):
    """Has state that `state_dict` returns and `load_state_dict` restores: a scheduler, a scaler, a callback."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state of `state_dict`."""


class TrainingState:
    """The state of training at one moment. `restore` returns to it, any number of times, bit for bit.

    It holds copies of parameters, their gradients, buffers, the state, settings and attributes of optimizers, the state
    of ``others``, and the random state of torch, numpy and Python. Parameters that only an optimizer knows count.
    Parameters, buffers and submodules keep their identity, so references to them stay valid; added ones are removed.
    Copies are on the devices of their tensors, or in a `TensorStore`, which shares what several states have in common.
    A tensor that FSDP2 divides is copied in parts, by each rank its own.

    It does not hold which parameters train (``Freezer.freeze_to`` changes that back), the mode of modules, attributes
    of modules that are not tensors, nor the position in the data: batches are the caller's. Capture and restore between
    two optimizer steps.

    Args:
        module: the model.
        optimizers: all optimizers that train it.
        others: learning-rate schedulers, a gradient scaler, and whatever else should return to this moment.
        store: keeps the copies; None keeps them on the devices. It cannot keep a tensor that FSDP2 divides.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    >>> def step():
    ...     optimizer.zero_grad()
    ...     loss = layer(torch.randn(3, 2)).square().sum()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss.item()
    >>> state = TrainingState(layer, [optimizer])
    >>> first = [step(), step()]
    >>> state.restore()
    >>> [step(), step()] == first
    True
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        others: Sequence[Stateful] = (),
        store: TensorStore | None = None,
    ) -> None:
        self._module = module
        self._members: list[tuple[nn.Module, str, dict[str, Any]]] = [
            (part, kind, dict(getattr(part, kind))) for part in module.modules() for kind in ("_modules", "_parameters")
        ]
        keep = _keep if store is None else store.keep
        parameters = dict.fromkeys(module.parameters())
        parameters |= dict.fromkeys(one for opt in optimizers for group in opt.param_groups for one in group["params"])
        self._parameters = [(_Copy(parameter, keep), _Gradient(parameter, keep)) for parameter in parameters]
        self._buffers = {
            path: {name: None if buffer is None else _Copy(buffer, keep) for name, buffer in part._buffers.items()}
            for path, part in module.named_modules()
        }
        parts = {*map(id, [*module.modules(), *optimizers])}
        self._optimizers = [_OptimizerState(optimizer, keep, parts) for optimizer in optimizers]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._random = RandomState.current()
        if store is not None:
            store.settle()

    def restore(self) -> None:
        """Return to the moment of the capture."""
        for part, kind, members in self._members:
            put_back(getattr(part, kind), members)
        parts = dict(self._module.named_modules())
        self.restore_parameters()
        with torch.no_grad():
            for parameter, gradient in self._parameters:
                gradient.write_back(parameter.original)
            for path, buffers in self._buffers.items():
                values = {name: None if copied is None else copied.write_back() for name, copied in buffers.items()}
                put_back(parts[path]._buffers, values)
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        for optimizer in self._optimizers:  # behind the schedulers, which may write into it
            optimizer.restore()
        self._random.restore()

    def restore_parameters(self) -> None:
        """Write the values of the parameters back, and nothing else."""
        with torch.no_grad():
            for parameter, _ in self._parameters:
                parameter.write_back()


class _Values(Protocol):
    def values(self) -> Tensor: ...


_Keep: TypeAlias = Callable[[Tensor], _Values]


class _OnDevice:
    """A copy on the device of its tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach().clone()

    def values(self) -> Tensor:
        return self._values


_keep: _Keep = _OnDevice


class _Copy:
    """A tensor and a copy of its values."""

    def __init__(self, original: Tensor, keep: _Keep) -> None:
        self.original = original
        self._kept = keep(original)

    def write_back(self) -> Tensor:
        """Write the values into the tensor, and return it."""
        _write(self._kept.values(), self.original)
        return self.original


class _Gradient:
    """The gradient of a parameter. Each step may make a new tensor, so the old one is kept only while others do."""

    def __init__(self, parameter: Tensor, keep: _Keep) -> None:
        self._kept = keep(parameter.grad) if parameter.grad is not None else None
        self._original = weakref.ref(parameter.grad) if parameter.grad is not None else None

    def write_back(self, parameter: Tensor) -> None:
        """Give the parameter its gradient back."""
        if self._kept is None or self._original is None:
            parameter.grad = None
            return
        values, original = self._kept.values(), self._original()
        gradient = original if original is not None else parameter.grad
        if gradient is None or gradient.shape != values.shape or gradient.dtype != values.dtype:
            gradient = torch.empty_like(values, device=parameter.device)
        _write(values, gradient)
        parameter.grad = gradient


def _write(values: Tensor, original: Tensor) -> None:
    target = original.detach()
    if target.layout is torch.strided:
        for dim in range(target.dim()):
            if target.stride(dim) == 0 and target.shape[dim] > 1:  # expanded: several indices, one element
                target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


class _OptimizerState:
    """Not `Optimizer.state_dict`: loading that casts state to the dtype of its parameter.

    Attributes return too, those with an identity in ``parts`` by reference, and so do optimizers inside this one.
    """

    def __init__(self, optimizer: Optimizer, keep: _Keep, parts: set[int], seen: set[Optimizer] | None = None) -> None:
        self._optimizer = optimizer
        seen = seen if seen is not None else set()
        seen.add(optimizer)
        # Parameters are kept elsewhere, and stay what they are in lists of them.
        known: dict[int, Any] = {id(one): _Reference(one) for g in optimizer.param_groups for one in g["params"]}
        self._state = {parameter: _packed(state, keep, known) for parameter, state in optimizer.state.items()}
        self._groups = [
            (group, list(group["params"]), {n: _packed(one, keep, known) for n, one in group.items() if n != "params"})
            for group in optimizer.param_groups
        ]
        inside = held_by(optimizer, Optimizer)
        parts = parts | {*map(id, inside)}
        self._inner = [_OptimizerState(inner, keep, parts, seen) for inner in inside if inner not in seen]
        self._attributes = [(name, value, _packed(value, keep, known)) for name, value in _own(optimizer)]
        self._others = ObjectAttributes(optimizer, parts, without=(*_KNOWN, *(name for name, *_ in self._attributes)))

    def restore(self) -> None:
        for inner in self._inner:
            inner.restore()
        now, unpack = dict(self._optimizer.state), _Unpacking()
        self._optimizer.state.clear()
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = unpack(state, now.get(parameter))
        for group, parameters, settings in self._groups:
            before = dict(group)
            group.clear()
            group["params"] = list(parameters)
            group.update({name: unpack(packed, before.get(name)) for name, packed in settings.items()})
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        self._others.restore()
        own = dict(_own(self._optimizer))
        for name in own.keys() - {name for name, *_ in self._attributes}:
            delattr(self._optimizer, name)
        groups = [id(group) for group, _, _ in self._groups]
        for name, before, packed in self._attributes:
            value = before if id(before) in groups else unpack(packed, own.get(name))
            if type(before) is list:
                before[:] = value  # others may hold it too
                value = before
            setattr(self._optimizer, name, value)


def held_by(owner: Any, *kinds: type) -> list[Any]:
    """Return the objects of some classes that are attributes of an object, or stand in lists and dictionaries there.

    Such is the optimizer that Lookahead or SAM is around.
    """
    found = []
    for value in vars(owner).values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found += [one for one in held if isinstance(one, kinds)]
    return found


def _own(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """Attributes of an optimizer that are state: numbers, tensors and containers of them."""
    return [(name, value) for name, value in vars(optimizer).items() if name not in _KNOWN and _is_state(value)]


def _is_state(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_state, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_state, value))
    return isinstance(value, (Tensor, *PLAIN))


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A tensor in the state of an optimizer."""

    kept: _Values
    device: torch.device


class _Reference(NamedTuple):
    """A tensor that comes back as it is."""

    tensor: Tensor


def _packed(value: Any, keep: _Keep, known: dict[int, Any]) -> Any:
    """Copy state; ``known`` has what was copied, by identity, so a tensor that comes twice is one tensor later."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        packed: Any = _Packed(keep(value), value.device)
    elif type(value) is dict:
        packed = {name: _packed(item, keep, known) for name, item in value.items()}
    elif type(value) in (list, tuple):
        packed = type(value)(_packed(item, keep, known) for item in value)
    else:
        return copy.deepcopy(value)
    known[id(value)] = packed
    return packed


class _Unpacking:
    """Returns packed state. Tensors that the optimizer has now are written to, each once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._written: set[int] = set()

    def __call__(self, packed: Any, now: Any) -> Any:
        if id(packed) in self._known:
            return self._known[id(packed)]
        if isinstance(packed, _Reference):
            return packed.tensor
        if isinstance(packed, _Packed):
            value: Any = self._tensor(packed, now)
        elif type(packed) is dict:
            now = now if type(now) is dict else {}
            value = {name: self(item, now.get(name)) for name, item in packed.items()}
        elif type(packed) in (list, tuple):
            now = now if type(now) in (list, tuple) and len(now) == len(packed) else [None] * len(packed)
            value = type(packed)(self(item, place) for item, place in zip(packed, now, strict=True))
        else:
            return copy.deepcopy(packed)
        self._known[id(packed)] = value
        return value

    def _tensor(self, packed: _Packed, now: Any) -> Tensor:
        values = packed.kept.values()
        like = (values.shape, values.dtype, packed.device, values.stride())
        if type(now) is not Tensor or id(now) in self._written or now.requires_grad:
            return values.to(packed.device, copy=True)
        if now.layout is not torch.strided or (now.shape, now.dtype, now.device, now.stride()) != like:
            return values.to(packed.device, copy=True)
        self._written.add(id(now))
        return now.copy_(values)
