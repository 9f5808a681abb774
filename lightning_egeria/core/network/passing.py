"""Observing the boundary activations of a network while it runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_egeria.core.network.calls import boundary_activation
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.forwards import Forward, ForwardReplacements


class BoundaryObserver:
    """Calls `boundary_reached` with each boundary activation of a chain, between `start` and `stop`.

    Args:
        modules: modules of the network, by path.
        chain: layer chain of the network.
        first: index of the first layer module to observe.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, first: int = 0) -> None:
        self.modules = modules
        self.chain = chain
        self.first = first
        self._replacements = ForwardReplacements()

    def start(self) -> None:
        """Start observing."""
        for index in range(self.first, len(self.chain)):
            module = self.modules[self.chain.layer_modules[index].boundary]
            self._replacements.replace(module, functools.partial(self._passed, index))

    def stop(self) -> None:
        """Restore the modules. Safe to call twice."""
        self._replacements.restore()

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Take the boundary activation of layer module ``index``. Does nothing by default."""

    def _passed(self, index: int, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.boundary_reached(index, boundary_activation(output, self.chain.layer_modules[index].output_leaf))
            return output

        return forward
