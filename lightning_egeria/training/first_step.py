"""Finding the layer chain by observing the first training step, without repeating it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.distributed.gathering import GatheredWeights
from lightning_egeria.distributed.ranks import Ranks
from lightning_egeria.errors import LayerChainError, TooFewLayersError
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.compilation import eager
from lightning_egeria.network.limits import find_chain, other_network
from lightning_egeria.network.sharding import holds_shards
from lightning_egeria.network.tracing import StepTrace


class FirstStep:
    """Observes one training step on rank 0; the other ranks receive the layer chain.

    Args:
        module: the model.
        ranks: the processes of the job.

    Attributes:
        weights: the weights that FSDP2 gathered in this step; None without FSDP2, and on every rank but 0.
        other: output of `other_network` once there is a chain.
        frozen: the chain of layers that the user has frozen, if too few others train; None if there are none.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.other: str | None = None
        self._trainable = {parameter for parameter in module.parameters() if parameter.requires_grad}
        self.weights: GatheredWeights | None = None
        self.frozen: LayerChain | None = None
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
            self.weights = GatheredWeights(module)
            self.weights.start()
            self._context.callback(self.weights.stop)

    def stop(self) -> None:
        """Stop observing. Safe to call twice."""
        self._context.close()

    def chain(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer],
        layer_modules: Sequence[str] | None = None,
        freeze_until: str | float | None = None,
        or_frozen: bool = False,
    ) -> LayerChain:
        """Return the layer chain once the forward is over. Every rank must call it.

        Args:
            loss: loss of the step, before its backward.
            optimizers: all optimizers of the run.
            layer_modules: paths of the layer modules; None finds them.
            freeze_until: limit of the prefix, as for `PrefixFreezing`.
            or_frozen: with a limit of 0, return `LayerChain.of_frozen` if there is one.

        Raises:
            LayerChainError: if there is none; raised on all ranks.
            TooFewLayersError: if fewer than two layer modules are trainable so far; raised on all ranks.
        """
        self.stop()
        found: LayerChain | None = None
        error: LayerChainError | None = None
        if self._trace is not None:
            try:
                found = find_chain(self._trace, loss, optimizers, layer_modules, freeze_until)
                self.other = other_network(self._trace, loss, optimizers, self._trainable)
                if or_frozen and found.max_depth == 0 and freeze_until == 0:
                    found = LayerChain.of_frozen(self._trace, loss) or found
            except TooFewLayersError as failure:
                error, found = failure, LayerChain.of_frozen(self._trace, loss)
            except LayerChainError as failure:
                error = failure
        few = isinstance(error, TooFewLayersError)
        told = self._ranks.share(
            {"chain": found and found.to_state(), "error": error and str(error), "few": few, "other": self.other}
        )
        chain = found if found is not None or told["chain"] is None else LayerChain.from_state(told["chain"])
        self.other = told["other"]
        self.frozen = chain if told["few"] else None
        if error is not None:
            raise error
        if told["error"] is not None:
            kind = TooFewLayersError if told["few"] else LayerChainError
            raise kind(f"on rank 0: {told['error']}")
        assert chain is not None  # rank 0 has found it
        return chain
