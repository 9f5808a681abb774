"""Computing the Gram matrix of each boundary activation while the network runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_egeria.freezing.similarity import gram_matrix
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.passing import BoundaryObserver


class GramRecorder(BoundaryObserver):
    """Computes the Gram matrix of each boundary activation while the network runs.

    Args:
        modules: modules of the network, by path.
        chain: layer chain of the network.
        samples: samples in a Gram matrix, at most.
        first: index of the first layer module to record.

    Attributes:
        grams: Gram matrix of each boundary, ``[samples, samples]``; None where the network did not reach it.
        batch_size: batch size of the last activation.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, samples: int, first: int = 0) -> None:
        super().__init__(modules, chain, first)
        self.samples = samples
        self.grams: list[Tensor | None] = [None] * len(chain)
        self.batch_size = 0

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Compute the Gram matrix."""
        self.batch_size = activation.shape[0]
        self.grams[index] = gram_matrix(activation[: self.samples])
