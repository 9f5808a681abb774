"""Running each step with the gradients of one suffix, on the moments of training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.paused import PausedPrefix
from lightning_egeria.partial.suffixes import SuffixCycle
from lightning_egeria.training.observers import Observer


class SuffixSteps(Observer):
    """Pauses the layer modules in front of the suffix in each step, and counts the steps of each layer module.

    All batches of an accumulation window have one suffix. Between backward and optimizer step, each paused parameter
    without a gradient gets a gradient of zero. So the optimizer applies weight decay and momentum to every parameter
    once a step. Outside the forward and backward of a batch, ``requires_grad`` is as the user set it.

    Args:
        module: the model.
        chain: its layer chain. No more than ``chain.max_depth`` layer modules are paused.
        cycle: the suffix of each step.
        contributions: number of steps so far in which each layer module was in the suffix; counted up in place.
    """

    def __init__(self, module: nn.Module, chain: LayerChain, cycle: SuffixCycle, contributions: list[int]) -> None:
        self.cycle = cycle
        self.contributions = contributions
        self._paused = PausedPrefix(module, chain)
        self.depth = 0
        self._step = 0
        self._backward_over = False  # of this batch
        self._computed = False  # whether a batch of this step had a backward

    def depth_at(self, step: int) -> int:
        """Return the number of layer modules in front of the suffix.

        Args:
            step: number of optimizer steps so far.
        """
        chain = self._paused.chain
        return min(len(chain) - self.cycle.length(step), chain.max_depth)

    def batch_start(self, batch: Any, step: int) -> None:
        """Pause the layer modules in front of the suffix."""
        self._step, self.depth, self._backward_over = step, self.depth_at(step), False
        self._paused.pause(self.depth)

    def forward_end(self, loss: Tensor) -> None:
        """Check that the backward will be that of the suffix.

        Raises:
            UnsupportedError: if it is the second backward of the batch, or no parameter of the suffix trains.
        """
        if self.depth == 0:
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

    def backward_end(self) -> None:
        """Restore ``requires_grad`` and give paused parameters a gradient of zero.

        Raises:
            UnsupportedError: if a parameter that will be paused has a sparse gradient.
        """
        self._backward_over = self._computed = True
        self._paused.end()
        self._paused.add_zero_gradients()
        if self.depth == 0:
            self._paused.check_gradients()

    def batch_end(self) -> None:
        """Restore ``requires_grad``, if there was no backward."""
        self._paused.end()

    def optimizer_step(self, step: int) -> None:
        """Count the layer modules of the suffix, unless no batch of the step had a backward."""
        if self._computed:
            for index in range(self.depth, len(self.contributions)):
                self.contributions[index] += 1
        self._computed = False

    def abort(self) -> None:
        """Do the same as `batch_end`."""
        self._paused.end()
