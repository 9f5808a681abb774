"""Structured partial backprop as a Lightning callback. It only puts the parts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.compilation import is_compiled
from lightning_egeria.core.training.callback import PrefixFreezing, freezing_of
from lightning_egeria.core.training.checkpoints import checkpoint_read, count_of
from lightning_egeria.core.training.finding import LayerFinding
from lightning_egeria.core.training.panels import Panel
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.partial import METHOD
from lightning_egeria.methods.partial.arguments import PartialArguments
from lightning_egeria.methods.partial.display import panels_of_savings
from lightning_egeria.methods.partial.exchange import ContributorMean, GradientExchange, RankGroups, RescaledMean
from lightning_egeria.methods.partial.grading import GradedPlan, Grading
from lightning_egeria.methods.partial.measuring import SuffixMeasures
from lightning_egeria.methods.partial.plans import SuffixPlan
from lightning_egeria.methods.partial.savings import PartialSavings
from lightning_egeria.methods.partial.steps import SuffixSteps
from lightning_egeria.methods.partial.support import check_batches, check_model, check_trainer, exchanged_layers


class StructuredPartialBackprop(LayerFinding):
    """Computes the gradients of the last layer modules only. How many varies by step or by rank.

    The callback finds the layer modules in the first training step, so the model needs no changes. In a step, the layer
    modules in front of the suffix run in training mode and without gradient. Their gradient is the mean over the ranks
    that computed it, or zero. The optimizer therefore applies weight decay and momentum to every parameter in every
    step, and all ranks stay equal. With ``min_share=1``, training is bit for bit training without the callback.

    Args:
        depths: number of layer modules whose gradients a rank computes. ``"temporal"``: in turn from the whole chain to
            its last part, the same on all ranks. ``"graded"``: the same on all ranks; each layer module gets gradients
            in proportion to its plasticity, which `KnowledgeGuidedFreezing` measures. ``"uniform"``: at equal distances
            over the ranks. ``"weighted"``: fewer on ranks whose steps are slow. A list: one number for each rank.
        min_share: smallest share of the steps or ranks that compute the gradient of each layer module; in (0, 1].
        rotate_every_n_steps: number of steps after which ranks change places, for ``"uniform"`` (default 1) and lists
            (default 0, never).
        exchange: ``"contributors"``: each gradient is summed among the ranks that computed it, and sent to the others.
            ``"all"``: DDP sums it among all ranks, which saves no bytes and works with communication hooks.
        layer_modules: paths of the layer modules, in execution order; None finds them, or takes those of freezing.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = METHOD

    def __init__(
        self,
        depths: str | Sequence[int] = "temporal",
        min_share: float = 0.25,
        rotate_every_n_steps: int | None = None,
        exchange: str = "contributors",
        layer_modules: Sequence[str] | None = None,
    ) -> None:
        super().__init__("partial backprop", layer_modules)
        self.arguments = PartialArguments(depths, min_share, rotate_every_n_steps, exchange)
        self._contributions: list[int] = []
        self._steps: SuffixSteps | None = None  # during training
        self._measures: SuffixMeasures | None = None
        self._grading: Grading | None = None
        self._savings: PartialSavings | None = None  # after training
        self._strategy: Any = None  # during training

    @property
    def contributions(self) -> dict[str, int]:
        """For each layer module, the number of gradients so far, over steps and ranks; empty before training."""
        return dict(zip(self.layer_modules, self._contributions, strict=True)) if self.chain is not None else {}

    def panels(self) -> list[Panel]:
        """Return the figures of this `fit` for a report."""
        savings = self.savings()
        return panels_of_savings(savings) if savings is not None else []

    @property
    def paused_modules(self) -> int:
        """Number of layer modules in front of the suffix of this rank, in the latest batch."""
        return self._steps.depth if self._steps is not None else 0

    def savings(self) -> PartialSavings | None:
        """Return the work that this `fit` left out so far; None before the first step."""
        if self._measures is None:
            return self._savings
        shares = self._measures.times.shares()
        return self._measures.counts.savings(shares, self.contributions, self._measures.activation_bytes)

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse a Trainer that partial backprop does not support."""
        check_trainer(trainer, self.arguments, self._named_layer_modules)

    def chain_source(self, trainer: pl.Trainer) -> PrefixFreezing | None:
        """Return the callback that freezes: suffixes begin at its frozen depth."""
        return freezing_of(trainer)

    def forget_fit(self) -> None:
        """Drop what is left of an earlier `fit`."""
        super().forget_fit()
        self._contributions, self._savings = [], None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that all ranks have as many batches.

        Raises:
            UnsupportedError: if they have not.
        """
        if self.is_active:
            check_batches(self.ranks, trainer.num_training_batches)

    def chain_found(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, state: dict[str, Any] | None
    ) -> None:
        """Begin the suffixes.

        Raises:
            ArgumentError: if the given depths do not fit the layer chain.
            UnsupportedError: if the model or DDP is set up in a way that partial backprop does not support.
            CheckpointError: if the state in the checkpoint is damaged.
        """
        if is_compiled(pl_module):
            raise UnsupportedError(
                "partial backprop changes which parameters have a gradient in each step, so a compiled model would "
                "compile again. Remove torch.compile"
            )
        if state is None:
            self._contributions = [0] * len(chain)
        elif len(self._contributions) != len(chain):
            with checkpoint_read("partial backprop"):
                raise ValueError(f"{len(self._contributions)} contributions of {len(chain)} layer modules")
        self._strategy = trainer.strategy
        source, size = self.chain_source(trainer), trainer.world_size
        plan = self.arguments.plan(size, len(chain))
        if isinstance(plan, GradedPlan) and source is not None:
            self._grading = Grading(plan, source, self.ranks, self.notices.inform)
            if state is not None:
                with checkpoint_read("partial backprop"):
                    self._grading.load_state_dict(state["grading"])
        plan.check(len(chain), chain.max_depth)
        layers = exchanged_layers(pl_module, chain, trainer)
        exchange = None
        if self.ranks.several and chain.max_depth and plan.pauses(len(chain)):
            check_model(trainer, pl_module, plan, self.arguments)
            exchange = self._exchange(trainer, pl_module, layers)

        def bounds() -> tuple[int, int]:
            frozen = source.frozen_depth if source is not None else 0
            return frozen, max(frozen, chain.max_depth)

        self._steps = SuffixSteps(
            pl_module,
            chain,
            plan,
            self._contributions,
            trainer.global_rank,
            size,
            exchange,
            trainer.strategy,
            bounds,
            trainer.global_step if state is None else None,
        )
        self._measures = SuffixMeasures(
            pl_module,
            layers,
            self._steps,
            self.ranks,
            trainer.strategy.root_device,
            chain.max_depth,
            self.notices.inform,
        )
        self.observers.add(self._steps)
        self.observers.add(self._measures)
        if self._grading is not None:
            self.observers.add(self._grading)
        self._tell(chain, plan, size)

    def _exchange(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, layers: Sequence[Sequence[nn.Parameter]]
    ) -> GradientExchange:
        if self.arguments.exchange == "all":
            return RescaledMean(trainer.strategy, layers)
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        groups = RankGroups(getattr(trainer.strategy, "_timeout", None))
        return ContributorMean(groups, layers, lambda parameter: names.get(parameter, "a parameter"))

    def _tell(self, chain: LayerChain, plan: SuffixPlan, size: int) -> None:
        """Log the suffixes that come."""
        if chain.max_depth == 0:
            self.notices.warn(
                "every step is a full backward: no boundary can be cut, because weights are shared across it. The "
                "message before this one names them"
            )
        elif size == 1 and self.arguments.depths in ("uniform", "weighted"):
            self.notices.warn(
                f"depths={self.arguments.depths!r} gives each rank a suffix, and there is only one process, so all "
                "steps are full. Use depths='temporal'"
            )
        elif (text := plan.describe(chain.names, chain.max_depth)) is not None:
            self.notices.inform(text)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what the run left out."""
        super().on_fit_end(trainer, pl_module)
        savings = self.savings()
        for line in savings.describe() if savings is not None else ():
            self.notices.inform(line)

    def chain_released(self) -> None:
        """Stop pausing layer modules."""
        self._savings = self.savings()
        self._strategy = None
        for observer in (self._steps, self._measures, self._grading):
            if observer is not None:
                self.observers.remove(observer)
        if self._steps is not None:
            self._steps.close()
        self._steps = self._measures = self._grading = None

    def own_state(self) -> dict[str, Any]:
        """Return the contributions, and how suffixes are graded. Others follow from the step, or are measured again."""
        grading = self._grading.state_dict() if self._grading is not None else None
        return {"contributions": list(self._contributions), "grading": grading}

    def read_own_state(self, state: dict[str, Any]) -> None:
        """Take the contributions."""
        self._contributions = [count_of(value) for value in state["contributions"]]
