"""The first training step, observed rather than repeated: it shows the layer chain to all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import nn

from lightning_egeria.compilation import eager
from lightning_egeria.errors import LayerChainError, TooFewLayersError
from lightning_egeria.freezing.ranks import Ranks
from lightning_egeria.freezing.sharded import PassingWeights
from lightning_egeria.layers import LayerChain
from lightning_egeria.tracing import StepTrace, holds_shards


class FirstStep:
    """Observes one training step where this rank leads; the others take its word.

    Args:
        module: the model.
        ranks: that train it.

    Attributes:
        weights: that passed by, if they are divided among ranks; None if they are not, or the rank does not lead.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.weights: PassingWeights | None = None
        self._ranks = ranks
        self._trace: StepTrace | None = None
        self._context = contextlib.ExitStack()
        if not ranks.leads:
            return
        self._context.enter_context(eager())
        self._trace = StepTrace(module)
        self._trace.start()
        self._context.callback(self._trace.stop)
        if holds_shards(module):
            self.weights = PassingWeights(module)
            self.weights.start()
            self._context.callback(self.weights.stop)

    def stop(self) -> None:
        """Observe no longer. Safe to call twice."""
        self._context.close()

    def chain(self, find: Callable[[StepTrace], LayerChain]) -> LayerChain:
        """The layer chain, when the forward is over. Every rank must call it.

        Args:
            find: makes it of what was observed.

        Raises:
            LayerChainError: as ``find``, on all ranks.
        """
        self.stop()
        found, error = None, None
        if self._trace is not None:
            try:
                found = find(self._trace)
            except LayerChainError as failure:
                error = failure
        few = isinstance(error, TooFewLayersError)
        told = self._ranks.share({"chain": found and found.to_state(), "error": error and str(error), "few": few})
        if error is not None:
            raise error
        if told["error"] is not None:
            kind = TooFewLayersError if told["few"] else LayerChainError
            raise kind(f"on rank 0: {told['error']}")
        return found or LayerChain.from_state(told["chain"])
