"""Finding the layer chain: in the first training step, and again when more parameters train."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.core.distributed.gathering import GatheredWeights
from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.compilation import eager
from lightning_egeria.core.network.limits import find_chain, other_network
from lightning_egeria.core.network.sharding import holds_shards
from lightning_egeria.core.network.tracing import StepTrace
from lightning_egeria.core.network.trainable import TrainableParameters, without_part_in
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import CheckpointError, LayerChainError, TooFewLayersError, first_of


class FirstStep:
    """Observes one training step on rank 0; the other ranks receive the layer chain.

    Args:
        module: the model.
        ranks: the processes of the job.

    Attributes:
        weights: the weights that FSDP2 gathered in this step; None without FSDP2, and on every rank but 0.
        other: output of `other_network` once there is a chain.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.weights: GatheredWeights | None = None
        self.other: str | None = None
        self._trainable = {parameter for parameter in module.parameters() if parameter.requires_grad}
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
    ) -> LayerChain:
        """Return the layer chain once the forward is over. Every rank must call it.

        Args:
            loss: loss of the step, before its backward.
            optimizers: all optimizers of the run.
            layer_modules: paths of the layer modules; None finds them.
            freeze_until: limit of the prefix, as for `PrefixFreezing`.

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
            except LayerChainError as failure:
                error = failure
        few = isinstance(error, TooFewLayersError)
        told = self._ranks.share(
            {"chain": found and found.to_state(), "error": error and str(error), "few": few, "other": self.other}
        )
        chain = found if found is not None or told["chain"] is None else LayerChain.from_state(told["chain"])
        self.other = told["other"]
        if error is not None:
            raise error
        if told["error"] is not None:
            kind = TooFewLayersError if told["few"] else LayerChainError
            raise kind(f"on rank 0: {told['error']}")
        assert chain is not None  # rank 0 has found it
        return chain


class LayerSearch:
    """Looks for the layer chain of a model while it trains.

    Args:
        ranks: processes that train the model; rank 0 looks.
        notices: takes log lines and warnings.
        layer_modules: paths of the layer modules, in execution order; None finds them.
        freeze_until: limit of the prefix, as for `PrefixFreezing`.

    Attributes:
        trainable: parameters that were trainable during the search.
        gathered: weights that FSDP2 gathered in the first step, by name; None without FSDP2.
    """

    def __init__(
        self,
        ranks: Ranks,
        notices: Notices,
        layer_modules: Sequence[str] | None,
        freeze_until: str | float | None,
    ) -> None:
        self.trainable = TrainableParameters()
        self.gathered: Mapping[str, Tensor] | None = None
        self._ranks = ranks
        self._notices = notices
        self._layer_modules = layer_modules
        self._freeze_until = freeze_until
        self._step: FirstStep | None = None

    @property
    def is_looking(self) -> bool:
        """Whether it observes a training step."""
        return self._step is not None

    def start(self, module: nn.Module) -> None:
        """Start observing the training step that begins now."""
        self.trainable.note(module)
        self._step = FirstStep(module, self._ranks)

    def stop(self) -> bool:
        """Stop observing; return whether it observed a step. Safe to call twice."""
        step, self._step = self._step, None
        if step is not None:
            step.stop()
        return step is not None

    def chain(self, module: nn.Module, loss: Tensor, optimizers: Sequence[Optimizer]) -> LayerChain | None:
        """Return the layer chain once the forward is over. Every rank must call it.

        Args:
            module: the model.
            loss: loss of the step, before its backward.
            optimizers: all optimizers of the run.

        Returns:
            The chain; None if fewer than two layer modules are trainable so far, or if it is one of several networks
            with an optimizer each, and the user has not named the layer modules of one.

        Raises:
            LayerChainError: if the model has no layer chain, or too few of the named layer modules train and none may
                do so later.
        """
        assert self._step is not None  # `start` comes first
        try:
            chain = self._step.chain(loss, optimizers, self._layer_modules, self._freeze_until)
        except TooFewLayersError as error:
            fixed = without_part_in(loss, module)
            if not fixed and self._layer_modules is not None:
                raise
            then = "Training continues as without the callback"
            if fixed:
                then = (
                    f"Parameters that are not training yet: {first_of(fixed)}. The callback looks for layer modules "
                    "again at the start of each epoch"
                )
            self._notices.warn(f"{self._why_few(module, str(error))}. {then}", once="few")
            return None
        finally:
            weights = self._step.weights
            self.gathered = weights.weights if weights is not None else None
            other = self._step.other
            self._step = None
        if other is not None and self._layer_modules is None and not isinstance(self._freeze_until, str):
            self._notices.warn(
                f"{type(module).__name__} trains several networks, with an optimizer each. The first backward pass "
                f"reaches {chain.names[0]!r}, but not {other!r}. Name the layer modules of one network with "
                "layer_modules=[...]. Training continues as without the callback",
                once="several networks",
            )
            return None
        for note in chain.notes:
            self._notices.warn(note)
        return chain

    def _why_few(self, module: nn.Module, reason: str) -> str:
        """Return why too few layer modules train: what the user has frozen comes first, with what serves it."""
        held = [name for name, one in module.named_parameters() if not one.requires_grad]
        if not held or self._layer_modules is not None:
            return reason
        return (
            f"you have frozen {first_of(held)}. FrozenPrefixCache alone serves frozen layers, without this callback, "
            f"which has nothing more to freeze: {reason.partition('. ')[0]}"
        )

    def check_restored(self, chain: LayerChain, layer_modules: Sequence[str] | None) -> None:
        """Check that the chain of a checkpoint has the layer modules of this search.

        Args:
            chain: chain from the checkpoint.
            layer_modules: argument of the callback that wrote the checkpoint.

        Raises:
            CheckpointError: if this callback has other layer modules.
        """
        if self._layer_modules not in (None, layer_modules, list(chain.names)):
            raise CheckpointError(
                f"the checkpoint was written with layer_modules={list(chain.names)}, and this callback has "
                f"layer_modules={self._layer_modules}. Pass the same, or leave out ckpt_path to start again"
            )
