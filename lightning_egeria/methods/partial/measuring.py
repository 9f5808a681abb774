"""Measuring what suffixes take and save, on the moments of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.saved import SavedActivations
from lightning_egeria.core.profiling.clock import mark, reached, seconds_between
from lightning_egeria.core.profiling.gradients import GradientClock, Mark
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.methods.partial.savings import SuffixCounts
from lightning_egeria.methods.partial.steps import SuffixSteps
from lightning_egeria.methods.partial.weighting import SuffixTimes, WeightedPlan, packed, unpacked

BALANCED_EVERY_STEPS = 10


class SuffixMeasures(Observer):
    """Times batches, counts bytes, and balances a `WeightedPlan`. Add it behind the steps, which it reads.

    Args:
        module: the model.
        layers: parameters of each layer module, front to back, and last of all that is in none.
        steps: the steps.
        ranks: the processes of the job.
        device: device that runs the backward.
        max_depth: largest depth of a suffix.
        report: takes a line for the log.

    Attributes:
        times: of the batches on this rank.
        counts: of the steps on all ranks.
        activation_bytes: bytes that autograd saved in a batch, by the depth of its suffix; once for each depth.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[Sequence[nn.Parameter]],
        steps: SuffixSteps,
        ranks: Ranks,
        device: torch.device,
        max_depth: int,
        report: Callable[[str], object] = str,
    ) -> None:
        self.times = SuffixTimes(max_depth + 1)
        self.counts = SuffixCounts(len(steps.depths))
        self.activation_bytes: dict[int, int] = {}
        self._module = module
        self._steps = steps
        self._ranks = ranks
        self._device = device
        self._max_depth = max_depth
        self._report = report
        self._bytes: dict[tuple[tuple[int, ...], int], tuple[list[float], list[float]]] = {}
        self._clock = GradientClock(layers, device)
        self._saved: SavedActivations | None = None
        self._began: Mark | None = None
        self._hook: RemovableHandle | None = None
        self._unread: tuple[int, Mark, Mark] | None = None  # depth, and the marks around the forward
        self._computed = False

    def batch_start(self, batch: Any, step: int) -> None:
        """Start timing the forward, and counting activations if the depth is new."""
        self._read()
        if self._balances or not self.times.full:
            self._began = mark(self._device)
            # DDP waits for rank 0 before it calls the module, and that is no work of this rank.
            self._hook = self._module.register_forward_pre_hook(self._entered)
        if self._steps.depth not in self.activation_bytes:
            self._saved = SavedActivations(self._module.parameters())
            self._saved.start()

    def forward_end(self, loss: Tensor) -> None:
        """Start timing the backward."""
        self._stop_counting(keep=True)
        if self._began is not None:
            self._unread = self._steps.depth, self._began, mark(self._device)
            self._clock.start()

    def backward_end(self) -> None:
        """Stop timing."""
        self._clock.stop()
        self._computed = True

    def batch_end(self) -> None:
        """Stop timing a batch without a backward."""
        self._clock.stop()
        self._stop_counting(keep=False)
        self._began = None

    def optimizer_step(self, step: int) -> None:
        """Count the step, and balance the ranks now and then."""
        if self._computed:
            self._count()
        self._computed = False
        plan = self._steps.plan
        if isinstance(plan, WeightedPlan) and step % BALANCED_EVERY_STEPS == 0:
            self._read()
            times = unpacked(self._ranks.each(packed(self.times.estimate(), self._max_depth + 1)))
            if times is not None and plan.balance(times):
                depths = ", ".join(map(str, plan.depths))
                self._report(f"step {step}: gradients of all but the first {depths} layer modules on rank 0, 1, ...")

    def abort(self) -> None:
        """Do the same as `batch_end`."""
        self.batch_end()
        self._unread = None

    @property
    def _balances(self) -> bool:
        return isinstance(self._steps.plan, WeightedPlan)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        self._began = mark(self._device)
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stop_counting(self, keep: bool) -> None:
        self._remove_hook()
        if self._saved is not None:
            self._saved.stop()
            if keep:
                self.activation_bytes[self._steps.depth] = self._saved.nbytes
            self._saved = None

    def _read(self) -> None:
        """Take the times of the last batch, if the device is done with it."""
        unread, self._unread = self._unread, None
        if unread is not None and self._clock.timed and reached(unread[2]):
            depth, began, ended = unread
            self.times.add(depth, seconds_between(began, ended), self._clock.seconds())

    def _count(self) -> None:
        depths, least = self._steps.depths, self._steps.least
        if (depths, least) not in self._bytes:
            self._bytes[depths, least] = self._received(depths), self._received((least,) * len(depths))
        self.counts.add(depths, least, *self._bytes[depths, least])

    def _received(self, depths: Sequence[int]) -> list[float]:
        exchange = self._steps.exchange
        return [exchange.received(depths, rank) if exchange is not None else 0.0 for rank in range(len(depths))]
