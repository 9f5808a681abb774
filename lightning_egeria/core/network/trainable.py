"""The trainable parameters of a model, and the learning rate of its front."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.core.network.sharding import holds_shards
from lightning_egeria.core.network.tracing import leaf_of, walk


class TrainableParameters:
    """The parameters of a module as in its optimizers, before a strategy may replace them."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._trainable: set[str] = set()
        self._held: dict[str, nn.Parameter] = {}  # those that were not trainable at `note`
        self._group = (0, 0)  # index of the front's optimizer and parameter group; the first ones until `follow`

    def note(self, module: nn.Module, trainable: Collection[str] | None = None) -> None:
        """Remember the parameters of the module, and which of them are trainable.

        Args:
            module: the model.
            trainable: their names; None takes those that are now.
        """
        self._parameters = dict(module.named_parameters())
        self._trainable = _trainable(module) if trainable is None else set(trainable)
        self._held = {name: one for name, one in self._parameters.items() if name not in self._trainable}

    def names(self) -> list[str]:
        """Return the names of the parameters that are trainable now, of those that were there at `note`."""
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]

    def has_new(self) -> bool:
        """Whether a parameter is trainable now that was there at `note` and was not; fast enough for each step."""
        return any(parameter.requires_grad for parameter in self._held.values())

    def new_in(self, module: nn.Module) -> list[str]:
        """Return the names of parameters that are trainable now and were not at `note`."""
        return sorted(_trainable(module) - self._trainable)

    def follow(self, front: str, optimizers: Sequence[Optimizer]) -> None:
        """Use the parameter group of the parameter ``front`` for `learning_rate`."""
        parameter, self._group = self._parameters[front], (0, 0)
        for number, optimizer in enumerate(optimizers):
            for group, entry in enumerate(optimizer.param_groups):
                if any(other is parameter for other in entry["params"]):
                    self._group = number, group
                    return

    def learning_rate(self, optimizers: Sequence[Optimizer]) -> float:
        """Return the learning rate of the followed group; NaN if the optimizer has none, as some adaptive ones do."""
        number, group = self._group
        try:
            return float(optimizers[number].param_groups[group]["lr"])
        except (IndexError, KeyError, TypeError, ValueError):
            return math.nan


@contextlib.contextmanager
def nothing_trains(module: nn.Module) -> Iterator[None]:
    """Let no parameter of a module require a gradient meanwhile; gradients stay enabled, as in training."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def without_part_in(loss: Tensor, module: nn.Module) -> list[str]:
    """Return the names of the parameters that this step does not train."""
    parameters = dict(module.named_parameters())
    if holds_shards(module) or loss.grad_fn is None:  # the graph has other tensors, or there is no graph
        return [name for name, parameter in parameters.items() if not parameter.requires_grad]
    trained = {leaf_of(node) for node in walk([loss.grad_fn], set())}
    return [name for name, parameter in parameters.items() if parameter not in trained]


def _trainable(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
