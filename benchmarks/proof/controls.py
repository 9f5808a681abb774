"""What our freezing is compared with: other ways to decide what freezes when, each as its authors describe it.

All of them freeze by the same means as `KnowledgeGuidedFreezing`, so that a step at one depth costs all of them the
same. A layer module of the chain stands where they say layer.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from lightning_egeria import KnowledgeGuidedFreezing
from lightning_egeria.freezing.policy import Decision


class _Schedule:
    """A policy that needs no reference; `depth_at` says what is frozen after a step."""

    wants_reference = holds_reference = False

    def __init__(self) -> None:
        self.depth = self.max_depth = 0

    def start(self, max_depth: int) -> None:
        self.max_depth = max_depth

    def depth_at(self, step: int) -> int:
        raise NotImplementedError

    def observe(
        self, step: int, plasticity: Sequence[float] | None, learning_rate: float, loss: float | None
    ) -> Decision | None:
        depth = min(self.max_depth, self.depth_at(step))
        if depth <= self.depth:
            return None
        self.depth = depth
        return Decision(depth, "scheduled")

    def state_dict(self) -> dict[str, Any]:
        return {"depth": self.depth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.depth = state["depth"]


class LinearFreezing(_Schedule):
    """The layer freezing of Composer (MosaicML): the frozen share grows linearly after a part of the run.

    Changes fall between epochs. The defaults are Composer's.

    Args:
        total_steps: steps of the run.
        steps_per_epoch: steps of an epoch.
        freeze_start: share of the run after which freezing begins.
        freeze_level: share of the layers that would be frozen at the end.
    """

    def __init__(
        self, total_steps: int, steps_per_epoch: int, freeze_start: float = 0.5, freeze_level: float = 1.0
    ) -> None:
        super().__init__()
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.freeze_start, self.freeze_level = freeze_start, freeze_level

    def depth_at(self, step: int) -> int:
        progress = step // self.steps_per_epoch * self.steps_per_epoch / self.total_steps
        elapsed = max(0.0, (progress - self.freeze_start) / (1 - self.freeze_start))
        return int(self.freeze_level * elapsed * (self.max_depth + 1) + 1e-9)


class FreezeOutSchedule(_Schedule):
    """When each layer freezes in FreezeOut (Brock et al., arXiv:1706.04983): at the cube of a linear ramp.

    Args:
        total_steps: steps of the run.
        first: of the ramp, before it is cubed: 0.8, as the paper advises, freezes the first layer at half of the run.
    """

    def __init__(self, total_steps: int, first: float = 0.8) -> None:
        super().__init__()
        self.total_steps, self.first = total_steps, first

    def share(self, layer: int) -> float:
        """Share of the run after which a layer freezes; the last one learns to the end."""
        return (self.first + (1 - self.first) * layer / self.max_depth) ** 3

    def depth_at(self, step: int) -> int:
        return sum(step >= self.share(layer) * self.total_steps - 1e-6 for layer in range(self.max_depth))


class FreezeOut(KnowledgeGuidedFreezing):
    """FreezeOut: each layer's learning rate follows its own cosine to zero, where the layer freezes.

    The learning rate of a layer that freezes after a share t of the run begins at 1/t of the others', so that all
    layers go the same way. It is set by scaling what each optimizer step did to the layer's weights, which for
    optimizers whose step is proportional to the learning rate (SGD, AdamW) is the same. The optimizer's own learning
    rate is to stay constant.
    """

    def __init__(self, total_steps: int, **arguments: Any) -> None:
        super().__init__(FreezeOutSchedule(total_steps), **arguments)
        self._before: list[tuple[nn.Parameter, Tensor, float]] = []

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._engine is not None  # there since before the backward of the first step
        layers, schedule = layer_of_parameters(self), self._engine.policy
        assert isinstance(schedule, FreezeOutSchedule)
        done = trainer.global_step / schedule.total_steps
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is None:
                continue
            layer = min(layers.get(name, schedule.max_depth), schedule.max_depth)  # the head learns to the end too
            end = schedule.share(layer)
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, done / end))) / end
            self._before.append((parameter, parameter.detach().clone(), factor))

    def on_train_batch_end(self, *arguments: Any) -> None:
        with torch.no_grad():
            for parameter, before, factor in self._before:
                parameter.copy_(before + factor * (parameter - before))
        self._before.clear()
        super().on_train_batch_end(*arguments)


class GradientNormTest(_Schedule):
    """The test of AutoFreeze (Liu et al., arXiv:2102.01386): layers freeze whose gradients' norm changes least.

    At the end of each interval, the gradients of a layer are summed over the interval, and the relative change of their
    norm from the interval before is compared among the layers that learn. All in front of the first one that is not
    below the median freeze.

    Args:
        total_steps: steps of the run.
        intervals: tests in the run; 20 in the authors' published commands.
    """

    def __init__(self, total_steps: int, intervals: int = 20) -> None:
        super().__init__()
        self.every = max(1, total_steps // intervals)
        self.norms: list[float] | None = None
        self.norms_before: list[float] | None = None

    def depth_at(self, step: int) -> int:
        if step % self.every or self.norms is None:
            return self.depth
        norms, before = self.norms, self.norms_before
        self.norms, self.norms_before = None, norms
        if before is None:
            return self.depth
        changes = [abs(b - n) / b if b else 0.0 for n, b in zip(norms, before, strict=True)][self.depth :]
        threshold = statistics.median(changes)
        return self.depth + next(index for index, change in enumerate(changes) if change >= threshold)


class AutoFreeze(KnowledgeGuidedFreezing):
    """Gives `GradientNormTest` what it asks for."""

    def __init__(self, total_steps: int, **arguments: Any) -> None:
        super().__init__(GradientNormTest(total_steps), **arguments)
        self._sums: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._engine is None:
            return
        layers = layer_of_parameters(self)
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and name in layers:
                gradient = parameter.grad.detach()
                self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient.clone()
        policy = self._engine.policy
        assert isinstance(policy, GradientNormTest)
        if (trainer.global_step + 1) % policy.every == 0:
            norms = [0.0] * (max(layers.values()) + 1)
            for name, total in self._sums.items():
                norms[layers[name]] += float(total.abs().sum())
            policy.norms = norms
            self._sums.clear()


def layer_of_parameters(freezing: KnowledgeGuidedFreezing) -> Mapping[str, int]:
    """Number of the layer module that each parameter of the chain belongs to, by its name."""
    chain = freezing._chain
    assert chain is not None
    layers: dict[str, int] = {}
    for layer in range(len(chain)):
        for name in chain.prefix_parameters(layer + 1):
            layers.setdefault(name, layer)
    return layers
