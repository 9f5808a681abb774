"""Structured partial backprop as a Lightning callback. It only puts the parts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.compilation import is_compiled
from lightning_egeria.partial.steps import SuffixSteps
from lightning_egeria.partial.suffixes import SuffixCycle, check_min_share
from lightning_egeria.training.callback import freezing_of
from lightning_egeria.training.checkpoints import checkpoint_read, count_of
from lightning_egeria.training.finding import LayerFinding


class StructuredPartialBackprop(LayerFinding):
    """Computes the gradients of the last layer modules only, of another number of them in each step.

    The callback finds the layer modules in the first training step, so the model needs no changes. In a step, the layer
    modules in front of the suffix run in training mode and without gradient. Their gradient is zero, so the optimizer
    applies weight decay and momentum to every parameter once a step. With ``min_share=1``, training is bit for bit
    that without the callback.

    Args:
        depths: how long suffixes are. ``"temporal"``: from the whole chain to its last part in turn, in one process.
        min_share: share of the steps in which each layer module gets a gradient, at least; in (0, 1].
        layer_modules: paths of the layer modules, in execution order; None finds them.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = "partial"

    def __init__(
        self, depths: str = "temporal", min_share: float = 0.25, layer_modules: Sequence[str] | None = None
    ) -> None:
        super().__init__("partial backprop", layer_modules)
        if depths != "temporal":
            raise ArgumentError(f"depths must be 'temporal', got {depths!r}")
        check_min_share(min_share)
        self.depths = depths
        self.min_share = min_share
        self._contributions: list[int] = []
        self._steps: SuffixSteps | None = None  # during training

    @property
    def contributions(self) -> dict[str, int]:
        """For each layer module, the number of steps so far that computed its gradient; empty before the first step."""
        return dict(zip(self.layer_modules, self._contributions, strict=True)) if self.chain is not None else {}

    @property
    def depth(self) -> int:
        """Number of layer modules in front of the suffix of the latest batch."""
        return self._steps.depth if self._steps is not None else 0

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse a Trainer that partial backprop does not support.

        Raises:
            UnsupportedError: with several processes, manual optimization, or a callback that freezes.
        """
        strategy = type(trainer.strategy).__name__
        if strategy != "SingleDeviceStrategy":
            raise UnsupportedError(f"partial backprop runs in one process so far, got {strategy}. Use devices=1")
        if not trainer.lightning_module.automatic_optimization:
            raise UnsupportedError(
                "partial backprop needs one backward for each batch, and manual optimization may have others. Use "
                "automatic optimization"
            )
        freezing = freezing_of(trainer)
        if freezing is not None:
            raise UnsupportedError(
                f"partial backprop and {type(freezing).__name__} do not work in one run so far. Remove one of them"
            )

    def forget_fit(self) -> None:
        """Drop what is left of an earlier `fit`."""
        super().forget_fit()
        self._contributions = []

    def chain_found(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, state: dict[str, Any] | None
    ) -> None:
        """Begin the cycle of suffixes.

        Raises:
            UnsupportedError: if `torch.compile` has compiled the model.
            CheckpointError: if the state in the checkpoint is damaged.
        """
        if is_compiled(pl_module):
            raise UnsupportedError(
                "partial backprop changes what has a gradient in each step, and a compiled model would compile again. "
                "Leave out torch.compile"
            )
        if state is None:
            self._contributions = [0] * len(chain)
        elif len(self._contributions) != len(chain):
            with checkpoint_read("partial backprop"):
                raise ValueError(f"{len(self._contributions)} contributions of {len(chain)} layer modules")
        cycle = SuffixCycle(len(chain), self.min_share)
        self._steps = SuffixSteps(pl_module, chain, cycle, self._contributions)
        self.observers.add(self._steps)
        if chain.max_depth == 0:
            self.notices.warn(
                "no layer module can do without its gradient, so all steps are whole. The message before this one has "
                "the weight that is used on both sides of each boundary"
            )
            return
        lengths = ", ".join(str(len(chain) - self._steps.depth_at(step)) for step in range(len(cycle.lengths)))
        self.notices.inform(
            f"gradients of the last {lengths} of {len(chain)} layer modules in turn; {chain.names[0]!r} has one in "
            f"{cycle.shares()[0]:.0%} of the steps"
        )

    def chain_released(self) -> None:
        """Stop pausing layer modules."""
        if self._steps is not None:
            self.observers.remove(self._steps)
        self._steps = None

    def own_state(self) -> dict[str, Any]:
        """Return the contributions. The suffix of a step follows from the number of steps alone."""
        return {"contributions": list(self._contributions)}

    def read_own_state(self, state: dict[str, Any]) -> None:
        """Take the contributions."""
        self._contributions = [count_of(value) for value in state["contributions"]]
