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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, SequentialLR

from lightning_egeria import Decision, Freezer, LayerChain, Observer, PrefixFreezing
from lightning_egeria.core.network.paused import PausedPrefix
from lightning_egeria.core.training.finding import LayerFinding


class StaticFreezing(PrefixFreezing):
    """Freezes once.

    Args:
        step: optimizer steps done before.
        depth: what freezes then.
        arguments: of `PrefixFreezing`.
    """

    def __init__(self, step: int, depth: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.step, self.depth = step, depth

    def choose_depth(self, step: int) -> Decision | None:
        return deeper(self.freezer, self.depth if step >= self.step else 0)


class ProbeThenTune(PrefixFreezing):
    """LP-FT (Kumar et al., ICLR 2022): the head alone learns in the first half of the run, then everything does.

    Each half has its own learning rate schedule: `two_cycles`.

    Args:
        total_steps: steps of the run.
        arguments: of `PrefixFreezing`.
    """

    def __init__(self, total_steps: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.total_steps = total_steps

    def choose_depth(self, step: int) -> Decision | None:
        return changed(self.freezer, self.freezer.chain.max_depth if step < self.total_steps / 2 else 0)


class GradualUnfreezing(PrefixFreezing):
    """Gradual unfreezing, as in ULMFiT (Howard and Ruder, ACL 2018): more learns in each epoch, from the head on.

    In the first epoch all that may freeze is frozen, in the last one nothing; the epochs between share the layers
    evenly.

    Args:
        total_steps: steps of the run.
        steps_per_epoch: steps of an epoch.
        arguments: of `PrefixFreezing`.
    """

    def __init__(self, total_steps: int, steps_per_epoch: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.steps_per_epoch, self.epochs = steps_per_epoch, total_steps // steps_per_epoch

    def choose_depth(self, step: int) -> Decision | None:
        left = max(0.0, 1 - step // self.steps_per_epoch / max(1, self.epochs - 1))
        return changed(self.freezer, round(self.freezer.chain.max_depth * left))


class LinearFreezing(PrefixFreezing):
    """The layer freezing of Composer (MosaicML): the frozen share grows linearly after a part of the run.

    Changes fall between epochs. The defaults are Composer's.

    Args:
        total_steps: steps of the run.
        steps_per_epoch: steps of an epoch.
        freeze_start: share of the run after which freezing begins.
        freeze_level: share of the layers that would be frozen at the end.
        arguments: of `PrefixFreezing`.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        freeze_start: float = 0.5,
        freeze_level: float = 1.0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.freeze_start, self.freeze_level = freeze_start, freeze_level

    def choose_depth(self, step: int) -> Decision | None:
        progress = step // self.steps_per_epoch * self.steps_per_epoch / self.total_steps
        elapsed = max(0.0, (progress - self.freeze_start) / (1 - self.freeze_start))
        layers = self.freezer.chain.max_depth + 1
        return deeper(self.freezer, int(self.freeze_level * elapsed * layers + 1e-9))


class FreezeOut(PrefixFreezing):
    """FreezeOut (Brock et al., arXiv:1706.04983): each layer's learning rate follows its own cosine to zero.

    There the layer freezes: after a share of the run that is the cube of a linear ramp over the layers. The learning
    rate of a layer that freezes after a share t of the run begins at 1/t of the others', so that all layers go the same
    way. It is set by scaling what each optimizer step did to the layer's weights, which for optimizers whose step is
    proportional to the learning rate (SGD, AdamW) is the same. The optimizer's own learning rate is to stay constant.

    Args:
        total_steps: steps of the run.
        first: of the ramp, before it is cubed: 0.8, as the paper advises, freezes the first layer at half of the run.
        arguments: of `PrefixFreezing`.
    """

    def __init__(self, total_steps: int, first: float = 0.8, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.total_steps, self.first = total_steps, first
        self._before: list[tuple[nn.Parameter, Tensor, float]] = []

    def share(self, layer: int) -> float:
        """Share of the run after which a layer freezes; the last one, and the head, learn to the end."""
        last = self.freezer.chain.max_depth
        return (self.first + (1 - self.first) * min(layer, last) / last) ** 3

    def choose_depth(self, step: int) -> Decision | None:
        ends = [self.share(layer) * self.total_steps for layer in range(self.freezer.chain.max_depth)]
        return deeper(self.freezer, sum(step >= end - 1e-6 for end in ends))

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: Optimizer
    ) -> None:
        layers, done = layer_of_parameters(self.freezer.chain), trainer.global_step / self.total_steps
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                end = self.share(layers.get(name, len(layers)))
                factor = 0.5 * (1 + math.cos(math.pi * min(1.0, done / end))) / end
                self._before.append((parameter, parameter.detach().clone(), factor))

    def on_train_batch_end(self, *arguments: Any) -> None:
        with torch.no_grad():
            for parameter, before, factor in self._before:
                parameter.copy_(before + factor * (parameter - before))
        self._before.clear()
        super().on_train_batch_end(*arguments)


class AutoFreeze(PrefixFreezing):
    """The test of AutoFreeze (Liu et al., arXiv:2102.01386): layers freeze whose gradients' norm changes least.

    At the end of each interval, the gradients of a layer are summed over the interval, and the relative change of their
    norm from the interval before is compared among the layers that learn. All in front of the first one that is not
    below the median freeze.

    Args:
        total_steps: steps of the run.
        intervals: tests in the run; 20 in the authors' published commands.
        arguments: of `PrefixFreezing`.

    Attributes:
        sums: of the gradients in this interval, by parameter.
    """

    def __init__(self, total_steps: int, intervals: int = 20, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.every = max(1, total_steps // intervals)
        self.sums: dict[str, Tensor] = {}
        self._norms: list[float] | None = None

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: Optimizer
    ) -> None:
        layers = layer_of_parameters(self.freezer.chain)
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and name in layers:
                gradient = parameter.grad.detach()
                self.sums[name] = self.sums[name].to(gradient) + gradient if name in self.sums else gradient.clone()

    def choose_depth(self, step: int) -> Decision | None:
        if step % self.every:
            return None
        norms, before = [0.0] * len(self.freezer.chain), self._norms
        layers, depth = layer_of_parameters(self.freezer.chain), self.freezer.depth
        for name, total in self.sums.items():
            norms[layers[name]] += float(total.abs().sum())
        self.sums, self._norms = {}, norms
        if before is None:
            return None
        changes = [abs(b - n) / b if b else 0.0 for n, b in zip(norms, before, strict=True)][depth:]
        threshold = statistics.median(changes)
        return deeper(self.freezer, depth + next(i for i, change in enumerate(changes) if change >= threshold))

    def method_state(self) -> dict[str, Any]:
        return {"sums": self.sums, "norms": self._norms}

    def start_method(
        self, trainer: lightning.Trainer, freezer: Freezer, gathered: Mapping[str, Tensor] | None, state: Any
    ) -> Sequence[Observer]:
        self.sums, self._norms = (state["sums"], state["norms"]) if state is not None else ({}, None)
        return ()


class SameSuffix(LayerFinding, Observer):
    """Computes the gradients of the same last layer modules in each step, to measure what such a step costs.

    Args:
        depth: number of layer modules in front of them.
    """

    def __init__(self, depth: int) -> None:
        super().__init__("same suffix")
        self.depth = depth
        self._paused: PausedPrefix | None = None

    def chain_found(self, trainer: Any, pl_module: Any, chain: LayerChain, state: Any) -> None:
        self._paused = PausedPrefix(pl_module, chain)
        self.observers.add(self)

    def chain_released(self) -> None:
        self.observers.remove(self)

    def own_state(self) -> dict[str, Any]:
        return {}

    def batch_start(self, batch: Any, step: int) -> None:
        self._paused.pause(self.depth)

    def backward_end(self) -> None:
        self._paused.end()
        self._paused.add_zero_gradients()

    def abort(self) -> None:
        self._paused.end()


def two_cycles(optimizer: Optimizer, total_steps: int, **arguments: Any) -> SequentialLR:
    """Return a schedule of two runs, one behind the other: `OneCycleLR` in each half of the steps."""
    half = total_steps // 2
    cycles = [OneCycleLR(optimizer, total_steps=steps, **arguments) for steps in (half, total_steps - half)]
    return SequentialLR(optimizer, cycles, [half])


def deeper(freezer: Freezer, depth: int) -> Decision | None:
    """To freeze to this depth, as far as the chain allows; None if as many layer modules are frozen."""
    depth = min(freezer.chain.max_depth, depth)
    return Decision(depth, "scheduled") if depth > freezer.depth else None


def changed(freezer: Freezer, depth: int) -> Decision | None:
    """To freeze or unfreeze to this depth; None if as many layer modules are frozen."""
    return Decision(depth, "scheduled") if depth != freezer.depth else None


def layer_of_parameters(chain: LayerChain) -> dict[str, int]:
    """Number of the layer module that each parameter of the chain belongs to, by its name."""
    return {name: layer for layer, module in enumerate(chain.layer_modules) for name in module.parameters}
