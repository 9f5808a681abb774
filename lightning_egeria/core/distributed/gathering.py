"""Collecting all weights of an FSDP2 model on one rank without a collective of our own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_egeria.core.network.forwards import Forward, ForwardReplacements
from lightning_egeria.core.network.sharding import is_distributed, is_sharded


class GatheredWeights:
    """Copies the weights of an FSDP2 model while it runs one forward.

    FSDP2 gathers the weights of each unit on all ranks whenever it calls that unit. This class copies them then.

    Attributes:
        weights: copies of the gathered weights in host memory, by name.
        buffers: copies of the buffers from before the forward, which changes them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replacements = ForwardReplacements()
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def start(self) -> None:
        """Start copying."""
        self.buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in self._module.named_buffers()}
        for path, part in self._module.named_modules():
            if is_sharded(part):
                self._replacements.replace(part, functools.partial(self._look, path, part))

    def stop(self) -> None:
        """Restore the modules. Safe to call twice."""
        self._replacements.restore()

    def _look(self, path: str, part: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in part.named_parameters(path):
                if name not in self.weights and not is_distributed(parameter):
                    self.weights[name] = parameter.detach().to("cpu", copy=True)
            return original(*args, **kwargs)

        return forward


def fill(tensors: list[Tensor], names: Mapping[int, str], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Replace sharded tensors by their gathered copies.

    Args:
        tensors: plain and sharded tensors.
        names: names of weights and buffers, by the ``id`` of the tensor.
        weights: gathered weights and buffers, by name.

    Raises:
        KeyError: if a sharded tensor was not gathered.
    """
    return [
        weights[names[id(tensor)]] if is_distributed(tensor) or names.get(id(tensor)) in weights else tensor
        for tensor in tensors
    ]
