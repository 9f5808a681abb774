"""The state of training, captured and restored within one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.snapshots.random_state import RandomState


class Stateful(Protocol):
    """Has state that `state_dict` returns and `load_state_dict` restores: a scheduler, a scaler, a callback."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state of `state_dict`."""


class TrainingState:
    """The state of training at one moment. `restore` returns to it, any number of times, bit for bit.

    It holds copies of parameters, their gradients, buffers, the state and the settings of optimizers, the state of
    ``others``, and the random state of torch, numpy and Python. Tensors stay on their devices and keep their identity,
    so nothing that refers to them needs to know. A tensor that FSDP2 divides is copied in parts, by each rank its own.

    It does not hold which parameters train (``Freezer.freeze_to`` changes that back), the mode of modules, attributes
    of modules that are not tensors, nor the position in the data: batches are the caller's. Capture and restore between
    two optimizer steps.

    Args:
        module: the model.
        optimizers: all optimizers that train it.
        others: learning-rate schedulers, a gradient scaler, and whatever else should return to this moment.

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
        self, module: nn.Module, optimizers: Sequence[Optimizer] = (), others: Sequence[Stateful] = ()
    ) -> None:
        self._module = module
        self._parameters = {name: _Copy.of(parameter) for name, parameter in module.named_parameters()}
        self._gradients = {name: _Copy.of(copied.original.grad) for name, copied in self._parameters.items()}
        self._buffers = {
            path: {name: _Copy.of(buffer) for name, buffer in part._buffers.items()}
            for path, part in module.named_modules()
        }
        self._optimizers = [_OptimizerState(optimizer) for optimizer in optimizers]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._random = RandomState.current()

    def restore(self) -> None:
        """Return to the moment of the capture.

        Raises:
            UnsupportedError: if the model has other parameters or other modules now; then nothing is restored.
        """
        parts = dict(self._module.named_modules())
        self._check(parts)
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                self._parameters[name].write_back()
                parameter.grad = self._gradients[name].write_back()
            for path, buffers in self._buffers.items():
                parts[path]._buffers.clear()
                parts[path]._buffers.update({name: copied.write_back() for name, copied in buffers.items()})
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        for optimizer in self._optimizers:  # behind the schedulers, which may write into it
            optimizer.restore()
        self._random.restore()

    def _check(self, parts: Mapping[str, nn.Module]) -> None:
        now = dict(self._module.named_parameters())
        changed = sorted(
            {name for name, copied in self._parameters.items() if now.get(name) is not copied.original}
            | (now.keys() - self._parameters.keys())
            | (parts.keys() ^ self._buffers.keys())
        )
        if changed:
            raise UnsupportedError(
                f"{changed[0]!r} was added, removed or replaced after the state of training was captured. Capture "
                "again after such a change"
            )


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A tensor and a copy of its values; None where there is none."""

    original: Any
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor | None) -> _Copy:
        return cls(tensor, None if tensor is None else tensor.detach().clone())

    def write_back(self) -> Any:
        """Write the values into the tensor, and return it."""
        if self.values is not None:
            target, values = self.original.detach(), self.values
            if target.layout is torch.strided:
                for dim in range(target.dim()):
                    if target.stride(dim) == 0 and target.shape[dim] > 1:  # expanded: several indices, one element
                        target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            target.copy_(values)
        return self.original


class _OptimizerState:
    """Not `Optimizer.state_dict`: loading that casts state to the dtype of its parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
        self._groups = [(group, list(group["params"]), _settings(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update({parameter: copy.deepcopy(state) for parameter, state in self._state.items()})
        for group, parameters, settings in self._groups:
            group.clear()
            group.update({"params": list(parameters), **copy.deepcopy(settings)})
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
