"""Running each step with the gradients of one suffix, on the moments of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_egeria.core.distributed.reducer import ReducerSwitch
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.paused import PausedPrefix
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.partial.exchange import GradientExchange
from lightning_egeria.methods.partial.plans import SuffixPlan


class SuffixSteps(Observer):
    """Pauses the layer modules in front of this rank's suffix in each step, and counts those of all ranks.

    All batches of an accumulation window have one suffix. Between backward and optimizer step, each paused parameter
    without a gradient gets the mean over the ranks that computed one, or else zero. So the optimizer applies weight
    decay and momentum to every parameter once a step, and alike on all ranks. Outside the forward and backward of a
    batch, ``requires_grad`` is as the user set it.

    Args:
        module: the model.
        chain: its layer chain. No more than ``chain.max_depth`` layer modules are paused.
        plan: the suffixes of each step.
        contributions: number of gradients so far of each layer module, over steps and ranks; counted up in place.
        rank: number of this process.
        ranks: number of processes.
        exchange: how gradients that not all ranks computed reach the others; None if all ranks compute all.
        strategy: strategy of the Trainer, whose DDP wrapper exchanges gradients otherwise.
        bounds: returns the smallest and the largest depth of a suffix in the next step; None: 0 and
            ``chain.max_depth``. The smallest is that of the frozen layer modules.
        whole_step: a step that has begun with a whole batch, so its other batches are whole; None: there is none.

    Attributes:
        depths: number of layer modules in front of the suffix of each rank, in the latest batch.
        least: number of frozen layer modules in it.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: LayerChain,
        plan: SuffixPlan,
        contributions: list[int],
        rank: int = 0,
        ranks: int = 1,
        exchange: GradientExchange | None = None,
        strategy: Any = None,
        bounds: Callable[[], tuple[int, int]] | None = None,
        whole_step: int | None = None,
    ) -> None:
        self.plan = plan
        self.contributions = contributions
        self.exchange = exchange
        self._paused = PausedPrefix(module, chain)
        self._rank = rank
        self._switch = ReducerSwitch(strategy)
        self._bounds = bounds
        self.least, self._most = self._bounds_now()
        self.depths: tuple[int, ...] = (self.least,) * ranks
        self._step = whole_step  # of the depths
        self._backward_over = False  # of this batch
        self._computed = False  # whether a batch of this step had a backward

    @property
    def depth(self) -> int:
        """Number of layer modules in front of the suffix of this rank, in the latest batch."""
        return self.depths[self._rank]

    @property
    def paused(self) -> int:
        """Number of layer modules in front of the suffix in the latest batch, without the frozen ones."""
        return self.depth - self.least

    @property
    def whole(self) -> bool:
        """Whether no rank paused anything in the latest batch."""
        return all(depth == self.least for depth in self.depths)

    def depths_at(self, step: int) -> tuple[int, ...]:
        """Return the number of layer modules in front of the suffix of each rank.

        Args:
            step: number of optimizer steps so far.
        """
        count = len(self._paused.chain)
        lengths = self.plan.lengths(step, count - self.least)
        return tuple(min(count - length, self._most) for length in lengths)

    def batch_start(self, batch: Any, step: int) -> None:
        """Pause the layer modules in front of the suffix."""
        if step != self._step:
            self.least, self._most = self._bounds_now()
            self._step, self.depths = step, self.depths_at(step)
        self._backward_over = False
        if self.exchange is not None:
            self.exchange.prepare()
            self._switch.batch_start(leave_out=self.exchange.replaces_ddp and not self.whole)
        self._paused.pause(self.depth)

    def forward_end(self, loss: Tensor) -> None:
        """Check that the backward will be that of the suffix.

        Raises:
            UnsupportedError: if it is the second backward of the batch, or no parameter of the suffix trains.
        """
        if self.whole:
            return
        if self._backward_over:
            raise UnsupportedError(
                f"the optimizer ran the training step more than once in step {self._step}, as LBFGS and SAM do. "
                "Partial backprop needs one backward for each batch. Use SGD, Adam or AdamW"
            )
        if not loss.requires_grad:
            length = len(self._paused.chain) - self.depth
            raise UnsupportedError(
                f"no parameter trains in the last {length} layer modules and the head, and step {self._step} has "
                "gradients there only. Set requires_grad before training starts"
            )
        if self.exchange is not None and self._switch.exchanges:
            self.exchange.begin(self.depths)

    def backward_end(self) -> None:
        """Restore ``requires_grad`` and give paused parameters the gradient of the others, or zero.

        Raises:
            ExchangeError: if another rank failed.
            UnsupportedError: if a parameter that will be paused has a sparse gradient.
        """
        self._backward_over = self._computed = True
        self._paused.end()
        if self.exchange is not None:
            self.exchange.finish()
        self._paused.add_zero_gradients()
        if not self.paused:
            self._paused.check_gradients()

    def batch_end(self) -> None:
        """Restore ``requires_grad``, if there was no backward, and DDP's own exchange."""
        self._paused.end()
        if self.exchange is not None:
            self.exchange.abort()
            self._switch.restore()

    def optimizer_step(self, step: int) -> None:
        """Count the layer modules of the suffixes, unless no batch of the step had a backward."""
        if self._computed:
            for index in range(len(self.contributions)):
                self.contributions[index] += sum(depth <= index for depth in self.depths)
        self._computed = False

    def abort(self) -> None:
        """Do the same as `batch_end`."""
        self.batch_end()

    def close(self) -> None:
        """Restore DDP's own exchange. Safe to call twice."""
        self.batch_end()
        if self.exchange is not None:
            self.exchange.close()

    def _bounds_now(self) -> tuple[int, int]:
        return self._bounds() if self._bounds is not None else (0, self._paused.chain.max_depth)
