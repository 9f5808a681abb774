"""Telling trained weights from initial ones by the normalisation layers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_egeria.core.network.sharding import is_distributed


def normalisation_layers(module: nn.Module) -> dict[str, bool]:
    """Return whether each normalisation layer has left its initial values, by path.

    Initial values are one number for all channels, and training gives each channel its own. A layer has left them
    if that is so for all that it keeps: weight, bias and running statistics. One of them alone proves nothing: a
    forward before training moves running statistics, and some networks begin with random weights here.

    A normalisation layer is a module with such values, one of whose classes has "Norm" in its name. Of a weight that
    FSDP2 divides, the part of this rank counts.

    Args:
        module: the model.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4, affine=False))
    >>> normalisation_layers(net)
    {'1': False, '2': False}
    """
    found = {}
    for path, part in module.named_modules():
        if any("Norm" in base.__name__ for base in type(part).__mro__):
            own = itertools.chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
            values = [tensor for name, tensor in own if name in ("weight", "bias", "running_mean", "running_var")]
            if values:
                found[path] = all(map(_differs_by_channel, values))
    return found


def of_trained_weights(
    module: nn.Module, layers: Mapping[str, bool], trained: Collection[nn.Parameter]
) -> dict[str, bool]:
    """Return the normalisation layers that say something about weights that train.

    A layer with parameters does if one of them trains. One without normalises the module in front of it, and does if
    that trains.

    Args:
        module: the model.
        layers: output of `normalisation_layers`.
        trained: parameters of the model that train.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    >>> of_trained_weights(net, normalisation_layers(net), list(net[2].parameters()))
    {'3': False}
    """
    known = set(trained)
    parts = dict(module.named_modules())
    return {path: left for path, left in layers.items() if not known.isdisjoint(_parameters_beside(parts, path))}


def _parameters_beside(parts: Mapping[str, nn.Module], path: str) -> list[nn.Parameter]:
    """The parameters of a module; without any, those of its nearest neighbour in front, then behind."""
    while path in parts and not any(True for _ in parts[path].parameters()):
        parent, _, name = path.rpartition(".")
        if not name:
            return []
        neighbours = dict(parts[parent].named_children())
        names = list(neighbours)
        place = names.index(name) if name in names else 0
        for neighbour in (*reversed(names[:place]), *names[place + 1 :]):
            if found := list(neighbours[neighbour].parameters()):
                return found
        path = parent
    return list(parts[path].parameters()) if path in parts else []


def looks_trained(layers: Iterable[bool]) -> bool:
    """Whether more than half of the normalisation layers have left their initial values; False without any.

    Args:
        layers: values of `normalisation_layers`.

    >>> looks_trained([True, True, False]), looks_trained([True, False]), looks_trained([])
    (True, False, False)
    """
    seen = list(layers)
    return 2 * sum(seen) > len(seen)


def _differs_by_channel(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta:
        return False
    # A DTensor has ``to_local``.
    own: Tensor = tensor.detach().to_local() if is_distributed(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return own.numel() > 1 and bool((own != own.flatten()[0]).any())
