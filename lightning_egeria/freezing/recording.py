"""A Gram matrix of each boundary activation, taken while the network runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_egeria.calls import boundary_activation
from lightning_egeria.freezing.similarity import gram_matrix
from lightning_egeria.layers import LayerChain
from lightning_egeria.tracing import Forward, ForwardReplacements


class BoundaryRecorder:
    """Takes the Gram matrix of each boundary activation of a chain while its network runs.

    Args:
        modules: the modules of the network by path.
        chain: names the boundaries.
        samples: Gram matrices are made of the first ``samples`` samples of a batch at most.
        first: index of the first layer module to record.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, samples: int, first: int = 0) -> None:
        self.modules = modules
        self.chain = chain
        self.samples = samples
        self.first = first
        self.grams: list[Tensor | None] = [None] * len(chain)
        self.batch_size = 0
        self._replacements = ForwardReplacements()

    def start(self) -> None:
        """Record from here on."""
        for index in range(self.first, len(self.chain)):
            module = self.modules[self.chain.layer_modules[index].boundary]
            self._replacements.replace(module, functools.partial(self._record, index))

    def stop(self) -> None:
        """Leave the modules as they were. Safe to call twice."""
        self._replacements.restore()

    def _record(self, index: int, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.boundary_reached(index, boundary_activation(output, self.chain.layer_modules[index].output_leaf))
            return output

        return forward

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Called with the boundary activation of layer module ``index`` as soon as it is there."""
        self.batch_size = activation.shape[0]
        self.grams[index] = gram_matrix(activation[: self.samples])
