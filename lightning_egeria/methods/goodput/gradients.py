"""Measuring the squared norms of gradients while training computes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_egeria.core.distributed.reducer import has_communication_hook
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.goodput.noise import GradientNoise

_ADAM_STEPS = 5  # before its second moments say enough


@dataclasses.dataclass
class _Step:
    """Squared norms of one optimizer step, by parameter group, on the device.

    Attributes:
        local: sum over the gradients of its batches, divided by ``batches ** 2``.
        count: gradients that are averaged, of all processes.
        scale: samples of all of them, in initial batches.
        batches: batches of this process.
        preconditioned: whether the gradients are divided by Adam's second moments.
        loss_scale: by which gradients are multiplied in half precision.
        total: squared norms of the mean gradient; None before it is there.
        biased: whether the gradients are those of two steps.
        steps: steps that they stand for.
    """

    local: Tensor
    count: int
    batches: int
    scale: float
    preconditioned: bool
    loss_scale: float
    total: Tensor | None = None
    biased: bool = False
    steps: int = 1


class GradientMeter:
    """Measures squared norms of the gradients of batches, processes and steps, and adds estimates to the noise.

    Several gradients of one step, of its batches or of several processes, give an estimate for each step. Where there
    is one gradient a step, two consecutive steps give one, which is biased, or the two halves of a batch. Norms are
    sums over parameter groups, computed by fused operations over all their gradients. With Adam and its like, gradients
    are divided by the square root of the second moments, as Adam's steps are.

    In each step call `begin`, for each batch `batch_end` after its backward, and with several processes
    `exchanged_bucket` for gradients that are about to be averaged. Results are read one step later, so that a
    GPU does not wait.

    Args:
        optimizer: the optimizer.
        noise: takes the estimates.
        every: measure each ``every``-th step, or pair of steps.
        replicas: number of processes.
        loss_scale: returns the factor of the gradients in half precision.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        noise: GradientNoise,
        every: int = 1,
        replicas: int = 1,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.noise = noise
        self._optimizer, self._every, self._replicas, self._loss_scale = optimizer, every, replicas, loss_scale
        self._find_parameters()
        self._step: _Step | None = None  # measured now
        self._unread: _Step | None = None
        self._kept: dict[nn.Parameter, Tensor] = {}  # gradients before this batch, or of the step before
        self._previous: _Step | None = None  # of a pair
        self._roots: dict[nn.Parameter, Tensor] = {}
        self._batch = 0
        self._divides = self._divided = False

    def begin(self, step: int, batches: int, scale: float) -> None:
        """An optimizer step begins.

        Args:
            step: number of optimizer steps so far.
            batches: batches whose gradients it will average, in this process; 0 does not measure the step.
            scale: samples of the step in all processes, in initial batches.
        """
        self.read()
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != len(self._groups):
            self._find_parameters()  # a callback for fine-tuning has added some
            self.forget()
        self._batch, self._step = 0, None
        self._roots.clear()
        if not batches:
            self.drop_pair()
            return
        single = batches * self._replicas == 1
        pair, second = divmod(step, 2)
        if not single or not second:
            self.drop_pair()
        if (pair if single else step) % self._every == 0 and (not single or not second or self._previous is not None):
            count = batches * self._replicas
            device = next(iter(self._groups)).device
            local = torch.zeros(self._count, device=device)
            self._step = _Step(local, count, batches, scale, self._is_adaptive(), self._loss_scale())

    def exchanged_bucket(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Gradients of the last batch in this process, before they are averaged over processes."""
        step = self._step
        if step is not None and self._batch == step.batches - 1:
            own = [(p, g) for p, g in zip(parameters, gradients, strict=True) if p in self._groups]
            self._add_local(step, [p for p, _ in own], [g for _, g in own], self._batch)

    def batch_end(self) -> None:
        """The backward of a batch is over."""
        step = self._step
        if step is None:
            return
        batch, self._batch = self._batch, self._batch + 1
        last = batch == step.batches - 1
        parameters = [p for p in self._groups if p.grad is not None]
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise UnsupportedError(
                "a parameter has a sparse gradient, and the gradient noise scale needs dense ones. Use sparse=False"
            )
        if not gradients:
            self._step = None
            return
        if step.count == 1:
            self._pair(step, parameters, gradients)
            return
        if not last or self._replicas == 1:
            self._add_local(step, parameters, gradients, batch)
        if last:
            step.total = self._squared(parameters, gradients, step.preconditioned)
            if self._replicas > 1:
                dist.all_reduce(step.local)
            self._kept.clear()
            self._unread, self._step = step, None

    def add_halves(
        self, first: Mapping[nn.Parameter, Tensor], second: Mapping[nn.Parameter, Tensor], scale: float, steps: int
    ) -> None:
        """Measure a step by the gradients of its two halves. Call it behind `begin`.

        Args:
            first: of the first half of its samples.
            second: of the others.
            scale: samples of both, in initial batches.
            steps: steps that the estimate stands for.
        """
        parameters = [p for p in self._groups if p in first and p in second]
        if not parameters:
            return
        parts = [[half[p] for p in parameters] for half in (first, second)]
        divide = self._is_adaptive()
        mean = torch._foreach_add(*parts)
        norms = [self._squared(parameters, gradients, divide) for gradients in (*parts, mean)]
        local, total = norms[0] + norms[1], norms[2] / 4
        self._unread = _Step(local, 2, 1, scale, divide, self._loss_scale(), total, steps=steps)

    def read(self) -> None:
        """Add the last step's estimate to the noise. The same on all processes."""
        step, self._unread = self._unread, None
        if step is None or step.total is None:
            return
        if step.preconditioned and not self._divided:
            self._divided = True
            self.noise.reset()
        unscaled = step.loss_scale**-2
        local = step.local * (step.batches**2 * unscaled / step.count)
        found = torch.stack([local, step.total * unscaled]).tolist()
        self.noise.add(found[0], found[1], step.count, step.scale, step.biased, step.steps)

    def forget(self) -> None:
        """Other parameters learn from now on: drop what was measured, and all estimates."""
        self._step = self._unread = None
        self._divides = self._divided = False
        self.drop_pair()
        self.noise.reset(self._count)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, in plain types and tensors: maybe the gradients of half a pair."""
        self.read()
        pair = self._previous
        return {
            "divided": self._divided,
            "pair": None if pair is None else dataclasses.asdict(pair),
            "kept": [self._kept.get(p) for p in self._groups] if pair is not None else [],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a `state`."""
        self._divided = bool(state["divided"])
        if state["pair"] is not None:
            self._previous = _Step(**state["pair"])
            self._previous.local = self._previous.local.to(next(iter(self._groups)).device)
            kept = zip(self._groups, state["kept"], strict=True)
            self._kept = {p: gradient.to(p.device, copy=True) for p, gradient in kept if gradient is not None}

    def drop_pair(self) -> None:
        """Drop the first of two steps."""
        self._previous = None
        self._kept.clear()

    def _find_parameters(self) -> None:
        groups = self._optimizer.param_groups
        self._groups = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self._count = len(groups)

    def _pair(self, step: _Step, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """One gradient a step: keep the first of two, and compare the second with it."""
        previous, self._step = self._previous, None
        if previous is None:
            self._previous = step
            self._keep(parameters, gradients)
            step.local = self._squared(parameters, gradients, step.preconditioned)
            return
        kept = self._kept
        same = previous.preconditioned == step.preconditioned and previous.loss_scale == step.loss_scale
        if same and previous.scale == step.scale and kept.keys() == set(parameters):
            mean = torch._foreach_add(gradients, [kept[p] for p in parameters])
            step.total = self._squared(parameters, mean, step.preconditioned) / 4
            step.local = previous.local + self._squared(parameters, gradients, step.preconditioned)
            step.scale, step.count, step.biased = 2 * step.scale, 2, True
            self._unread = step
        self.drop_pair()

    def _add_local(
        self, step: _Step, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], batch: int
    ) -> None:
        """Add the norms of this batch alone: of what its backward added to the gradients."""
        own: Sequence[Tensor] = gradients
        if batch > 0:
            before = [self._kept.get(p) for p in parameters]
            zeros = [torch.zeros_like(g) if b is None else b for b, g in zip(before, gradients, strict=True)]
            own = torch._foreach_sub(list(gradients), zeros)
        step.local += self._squared(parameters, own, step.preconditioned)
        if batch < step.batches - 1:
            self._keep(parameters, gradients)

    def _keep(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter not in self._kept:
                self._kept[parameter] = torch.empty_like(gradient)
        torch._foreach_copy_([self._kept[p] for p in parameters], list(gradients))

    def _squared(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], divide: bool) -> Tensor:
        """Return the squared norm of each parameter group, in float32."""
        if not gradients:  # of a bucket
            return torch.zeros(self._count, device=next(iter(self._groups)).device)
        values = list(gradients)
        if divide:
            values = list(torch._foreach_div(values, [self._root(p) for p in parameters]))
        squares = torch.stack([norm.float() for norm in torch._foreach_norm(values)]).square()
        if self._count == 1:
            return squares.sum(0, keepdim=True)
        groups = torch.tensor([self._groups[p] for p in parameters], device=squares.device)
        return torch.zeros(self._count, device=squares.device).index_add_(0, groups, squares)

    def _is_adaptive(self) -> bool:
        """Whether the optimizer divides by second moments, and has them."""
        if not self._divides:
            states: list[Any] = [self._optimizer.state[p] for p in self._groups if self._optimizer.state.get(p)]
            self._divides = bool(states) and all(
                "exp_avg_sq" in state and float(state["step"]) >= _ADAM_STEPS for state in states
            )
        return self._divides

    def _root(self, parameter: nn.Parameter) -> Tensor:
        """Return what Adam divides the gradient of a parameter by; it is the same within a step."""
        root = self._roots.get(parameter)
        if root is None:
            state: Any = self._optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                return torch.ones_like(parameter)  # it has its first gradient
            group = self._optimizer.param_groups[self._groups[parameter]]
            correction = math.sqrt(1 - group["betas"][1] ** float(state["step"]))
            root = self._roots[parameter] = (state["exp_avg_sq"].sqrt() / correction).add_(group["eps"])
        return root


def measure_exchange(model: Any, meter: GradientMeter) -> None:
    """Let a meter see each bucket of gradients before DDP averages it. Does nothing without DDP.

    The exchange is that of DDP without a hook, bit for bit. `rebuild_reducer` keeps the hook.

    Args:
        model: the strategy's model.
        meter: measures the gradients.

    Raises:
        UnsupportedError: if DDP has a communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if has_communication_hook(model):
        raise UnsupportedError(
            "the gradient noise scale is measured in DDP's communication hook, and the strategy has another "
            "hook. Remove ddp_comm_hook from DDPStrategy"
        )
    model.register_comm_hook(meter, _average)


# Without annotations: DDP looks at them, and does not know those that are texts.
def _average(meter, bucket):  # type: ignore[no-untyped-def]
    meter.exchanged_bucket(bucket.parameters(), bucket.gradients())
    gradients = bucket.buffer()
    gradients.mul_(1.0 / dist.get_world_size())  # as DDP does, before it adds
    sent: Any = dist.all_reduce(gradients, async_op=True)
    return sent.get_future().then(lambda done: done.value()[0])
