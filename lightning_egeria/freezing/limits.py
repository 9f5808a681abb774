"""How deep the prefix may become, for users who know better than the policy."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.errors import LayerChainError
from lightning_egeria.layers import LayerChain
from lightning_egeria.tracing import StepTrace


def find_chain(
    trace: StepTrace,
    loss: Tensor,
    optimizers: Sequence[Optimizer],
    layer_modules: Sequence[str] | None,
    max_frozen_fraction: float,
    freeze_until: str | None,
    never_freeze: Sequence[str],
) -> LayerChain:
    """The chain of the step that ``trace`` has seen, only as deep as everything allows; arguments as for the callback.

    Raises:
        LayerChainError: as `LayerChain.from_trace` and `depth_limit`.
    """
    chain = LayerChain.from_trace(trace, loss, layer_modules)
    limit = depth_limit(chain, max_frozen_fraction, freeze_until, never_freeze)
    chain = one_optimizer(chain, trace.parameters, optimizers)
    return dataclasses.replace(chain, max_depth=min(limit, chain.max_depth))


def depth_limit(
    chain: LayerChain,
    max_frozen_fraction: float = 1.0,
    freeze_until: str | None = None,
    never_freeze: Sequence[str] = (),
) -> int:
    """The deepest prefix that all of these allow, and the chain itself.

    Args:
        chain: of the model.
        max_frozen_fraction: of the layer modules, rounded down.
        freeze_until: path of the last layer module that may freeze, or of a module around or inside it.
        never_freeze: paths of modules; the prefix ends before the first layer module that has to do with one.

    Raises:
        LayerChainError: a path has to do with no layer module.

    >>> import torch
    >>> net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    >>> chain = LayerChain.trace(net, lambda: net(torch.ones(3, 2)).sum())
    >>> chain.names, chain.max_depth
    (('0', '1', '2', '3', '4'), 4)
    >>> depth_limit(chain, max_frozen_fraction=0.5), depth_limit(chain, freeze_until="0")
    (2, 1)
    >>> depth_limit(chain, never_freeze=["3", "4"])
    3
    """
    limit = min(chain.max_depth, int(max_frozen_fraction * len(chain)))
    if freeze_until is not None:
        limit = min(limit, _places(chain, freeze_until, "freeze_until")[-1] + 1)
    for path in never_freeze:
        limit = min(limit, _places(chain, path, "never_freeze")[0])
    return limit


def that_learn(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """The paths without those of modules in ``module`` that have parameters and learn none: they do not freeze anyway.

    >>> net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    >>> that_learn(net, ["0", "1"])
    ['1']
    """
    modules = dict(module.named_modules())
    learning = {path: [p.requires_grad for p in modules[path].parameters()] for path in paths if path in modules}
    return [path for path in paths if not learning.get(path) or any(learning[path])]


def one_optimizer(
    chain: LayerChain, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> LayerChain:
    """The chain, only as deep as its prefix belongs to one optimizer; a note says so.

    Args:
        chain: of the model.
        parameters: of the model by name.
        optimizers: all of the run. A parameter that none of them has may be anywhere.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    owners = {
        names[parameter]: number
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }
    first: int | None = None
    for index, layer_module in enumerate(chain.layer_modules):
        for name in layer_module.parameters:
            owner = owners.get(name)
            first = owner if first is None else first
            if owner is not None and owner != first:
                note = (
                    f"{layer_module.name!r} belongs to another optimizer than the layer modules before it, so at most "
                    f"{index} of {len(chain)} layer modules will freeze; layer_modules=[...] chooses others"
                )
                depth = min(chain.max_depth, index)
                return dataclasses.replace(chain, max_depth=depth, notes=(*chain.notes, note))
    return chain


def _places(chain: LayerChain, path: str, argument: str) -> list[int]:
    """Layer modules that are, contain, or lie inside the module ``path``."""
    places = []
    for index, layer_module in enumerate(chain.layer_modules):
        # The container of an earlier layer module may end with this one, and is no part of it.
        own = [m for m in layer_module.members if not any(name.startswith(f"{m}.") for name in chain.names)]
        if any(
            part == path or part.startswith(f"{path}.") for part in (layer_module.name, layer_module.boundary, *own)
        ):
            places.append(index)
    if not places:
        near = ", ".join(map(repr, difflib.get_close_matches(path, chain.names, n=3, cutoff=0.3) or chain.names[:5]))
        raise LayerChainError(f"{argument}: no layer module has to do with {path!r}; did you mean {near}?")
    return places
