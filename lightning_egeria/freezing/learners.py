"""Which parameters learn, and how fast the front of the network does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.tracing import holds_shards, leaf_of, walk


class Learners:
    """The parameters of a module as its optimizers know them, before a strategy may take their place."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._trainable: set[str] = set()
        self._group = (0, 0)  # numbers of the front's optimizer and of its group; of the first until `follow`

    def note(self, module: nn.Module) -> None:
        """Take down what is there, and what of it may learn."""
        self._parameters = dict(module.named_parameters())
        self._trainable = _trainable(module)

    def new_in(self, module: nn.Module) -> list[str]:
        """Names of those that may learn now and might not when they were noted."""
        return sorted(_trainable(module) - self._trainable)

    def follow(self, front: str, optimizers: Sequence[Optimizer]) -> None:
        """From here on, the learning rate is that of the parameter with this name."""
        parameter, self._group = self._parameters[front], (0, 0)
        for number, optimizer in enumerate(optimizers):
            for group, entry in enumerate(optimizer.param_groups):
                if any(other is parameter for other in entry["params"]):
                    self._group = number, group
                    return

    def learning_rate(self, optimizers: Sequence[Optimizer]) -> float:
        """Of the followed parameter's group, of the first one before `follow`.

        NaN where there is none: some optimizers find the size of their steps themselves.
        """
        number, group = self._group
        try:
            return float(optimizers[number].param_groups[group]["lr"])
        except (IndexError, KeyError, TypeError, ValueError):
            return math.nan


def without_part_in(loss: Tensor, module: nn.Module) -> list[str]:
    """Names of the parameters that this step does not train."""
    parameters = dict(module.named_parameters())
    if holds_shards(module) or loss.grad_fn is None:  # autograd sees other tensors, or there is nothing
        return [name for name, parameter in parameters.items() if not parameter.requires_grad]
    trained = {leaf_of(node) for node in walk([loss.grad_fn], set())}
    return [name for name, parameter in parameters.items() if parameter not in trained]


def _trainable(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
