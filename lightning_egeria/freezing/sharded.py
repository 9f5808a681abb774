"""Models whose weights FSDP2 divides among the ranks: how one rank gets all of them without another collective."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_egeria.tracing import Forward, ForwardReplacements, is_sharded


class PassingWeights:
    """Copies of the weights, taken while FSDP2 has them gathered for the calls of one forward.

    FSDP2 gathers the weights of each of its units for every call of it, on all ranks. This looks on.

    Attributes:
        weights: copies in host memory of the gathered weights, by name.
        buffers: copies of the buffers of before the forward, which changes them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replacements = ForwardReplacements()
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def start(self) -> None:
        """Look on from here on."""
        self.buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in self._module.named_buffers()}
        for path, part in self._module.named_modules():
            if is_sharded(part):
                self._replacements.replace(part, functools.partial(self._look, path, part))

    def stop(self) -> None:
        """Leave the modules as they were. Safe to call twice."""
        self._replacements.restore()

    def _look(self, path: str, part: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in part.named_parameters(path):
                if name not in self.weights and not is_distributed(parameter):
                    self.weights[name] = parameter.detach().to("cpu", copy=True)
            return original(*args, **kwargs)

        return forward


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is one rank's part of a larger one (a ``DTensor``)."""
    return hasattr(tensor, "full_tensor")


def undivided(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """Class and attributes that a module had before FSDP2 took hold of it.

    >>> undivided(nn.ReLU())[0].__name__
    'ReLU'
    """
    state = {name: value for name, value in vars(module).items() if not name.startswith("__composable_api_state_key")}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = state[name]
        own = {number: hook for number, hook in hooks.items() if not _is_of_fsdp(hook)}
        state[name] = type(hooks)(own)
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            if extra in state:
                state[extra] = type(state[extra])({n: value for n, value in state[extra].items() if n in own})
    bases = type(module).__mro__
    place = next((number for number, base in enumerate(bases) if base.__name__ == "FSDPModule"), -1)
    return bases[place + 1], state


def fill(tensors: list[Tensor], names: Mapping[int, str], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors, with those that were copied earlier in their place.

    Args:
        tensors: some of them divided.
        names: of weights and buffers, by the ``id`` of the tensor.
        weights: gathered, by name, and buffers.

    Raises:
        KeyError: one was not gathered.
    """
    return [
        weights[names[id(tensor)]] if is_distributed(tensor) or names.get(id(tensor)) in weights else tensor
        for tensor in tensors
    ]


def _is_of_fsdp(hook: Any) -> bool:
    parts = (hook, type(getattr(hook, "__self__", None)))
    return any(str(getattr(part, "__module__", "")).startswith("torch.distributed.") for part in parts)
