"""Limits of the prefix: the user's ``freeze_until``, and one optimizer for the whole prefix."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.tracing import StepTrace, walk
from lightning_egeria.core.network.trainable import without_part_in
from lightning_egeria.errors import LayerChainError, TooFewLayersError


def find_chain(
    trace: StepTrace,
    loss: Tensor,
    optimizers: Sequence[Optimizer],
    layer_modules: Sequence[str] | None = None,
    freeze_until: str | float | None = None,
) -> LayerChain:
    """Return the chain of a traced step, with all limits in ``max_depth``.

    Args:
        trace: trace of the forward, stopped.
        loss: loss of the forward, before the backward.
        optimizers: all optimizers of the run.
        layer_modules: paths of the layer modules in execution order; None finds them.
        freeze_until: as for `depth_limit`.

    Raises:
        LayerChainError: as for `LayerChain.from_trace` and `depth_limit`.
        TooFewLayersError: also if the first named layer module is one that another optimizer's turn leaves out.
    """
    if layer_modules:
        _check_first(trace.module, layer_modules[0], optimizers)
    chain = LayerChain.from_trace(trace, loss, layer_modules)
    # The chain has no modules that do not train. Other code may release this one later; nothing freezes until then.
    held = isinstance(freeze_until, str) and _learns_nothing(trace.module, freeze_until)
    limit = 0 if held else depth_limit(chain, freeze_until)
    chain = one_optimizer(chain, trace.parameters, optimizers)
    return dataclasses.replace(chain, max_depth=min(limit, chain.max_depth))


def depth_limit(chain: LayerChain, freeze_until: str | float | None = None) -> int:
    """Return the largest depth that may freeze.

    Args:
        chain: chain of the model.
        freeze_until: a share of the layer modules, rounded down; or the path of the last layer module that may freeze,
            or of a module around or inside it; None is ``chain.max_depth``.

    Raises:
        LayerChainError: if the path matches no layer module.

    >>> import torch
    >>> net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    >>> chain = LayerChain.trace(net, lambda: net(torch.ones(3, 2)).sum())
    >>> chain.names, chain.max_depth
    (('0', '1', '2', '3', '4'), 4)
    >>> depth_limit(chain), depth_limit(chain, 0.5), depth_limit(chain, "0")
    (4, 2, 1)
    """
    if freeze_until is None:
        return chain.max_depth
    if isinstance(freeze_until, str):
        return min(chain.max_depth, _place(chain, freeze_until) + 1)
    return min(chain.max_depth, int(freeze_until * len(chain)))


def _check_first(module: nn.Module, path: str, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a first layer module whose optimizer trains nothing now: what lies before it is not what is meant."""
    parts = dict(module.named_modules(remove_duplicate=False))
    own = set(parts[path].parameters()) if path in parts else set()
    for optimizer in optimizers:
        all_of_it = {one for group in optimizer.param_groups for one in group["params"]}
        if own & all_of_it and not any(one.requires_grad for one in all_of_it):
            raise TooFewLayersError(
                f"layer_modules: {path!r} does not train in the first backward pass (is its optimizer toggled off?). "
                "Name modules that do"
            )


def _learns_nothing(module: nn.Module, path: str) -> bool:
    """Whether the module at ``path`` has parameters, and none is trainable."""
    parameters = [p for part, inner in module.named_modules() if part == path for p in inner.parameters()]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def one_optimizer(
    chain: LayerChain, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> LayerChain:
    """Limit the chain to a prefix that belongs to one optimizer, as what may join it does; add a note if it is shorter.

    Args:
        chain: chain of the model.
        parameters: parameters of the model, by name.
        optimizers: all optimizers of the run. A parameter without an optimizer sets no limit.
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
    front = {owners.get(name) for name in chain.prefix_parameters(1)}
    # A network of another optimizer may train through the frozen layers, as a generator does through its critic.
    own = tuple(name for name in chain.absent if owners.get(name) in front)
    chain = dataclasses.replace(chain, absent=own)
    for index, layer_module in enumerate(chain.layer_modules):
        for name in layer_module.parameters:
            owner = owners.get(name)
            first = owner if first is None else first
            if owner is not None and owner != first:
                note = (
                    f"{layer_module.name!r} belongs to another optimizer than the layer modules in front of it, so at "
                    f"most {index} of {len(chain)} layer modules can freeze. Choose others with layer_modules=[...]"
                )
                depth = min(chain.max_depth, index)
                return dataclasses.replace(chain, max_depth=depth, notes=(*chain.notes, note))
    return chain


def other_network(
    trace: StepTrace, loss: Tensor, optimizers: Sequence[Optimizer], trainable: Collection[nn.Parameter]
) -> str | None:
    """Return the first layer of a network with an optimizer of its own that a loss does not reach; None without one.

    In a GAN whose discriminator trains first, that is the generator. One layer alone is no network that could freeze.

    Args:
        trace: trace of the forward, stopped.
        loss: loss of the forward, before the backward.
        optimizers: all optimizers of the run.
        trainable: parameters that trained when the batch began; a program may toggle some off in the step.
    """
    if len(optimizers) < 2 or loss.grad_fn is None:
        return None
    graph = set(walk([loss.grad_fn], set()))
    reached = {call.path for call in trace.calls if call.nodes_in(graph)}
    absent = set(without_part_in(loss, trace.module))
    for optimizer in optimizers:
        own = {one for group in optimizer.param_groups for one in group["params"]}
        names = [name for name, one in trace.parameters.items() if one in own]
        layers = dict.fromkeys(name.rpartition(".")[0] for name in names if trace.parameters[name].ndim > 1)
        if len(layers) > 1 and absent.issuperset(names) and reached.isdisjoint(layers) and own & set(trainable):
            return next(iter(layers))
    return None


def _place(chain: LayerChain, path: str) -> int:
    """Index of the last layer module that is, contains, or lies inside the module ``path``."""
    found = None
    for index, layer_module in enumerate(chain.layer_modules):
        # The container of an earlier layer module may end with this one, but does not belong to it.
        own = [m for m in layer_module.members if not any(name.startswith(f"{m}.") for name in chain.names)]
        parts = (layer_module.name, layer_module.boundary, *own)
        if any(part == path or part.startswith(f"{path}.") for part in parts):
            found = index
    if found is None:
        near = difflib.get_close_matches(path, chain.names, n=3, cutoff=0.3) or chain.names[:5]
        hint = ", ".join(map(repr, near))
        raise LayerChainError(f"freeze_until: {path!r} matches no layer module. Did you mean {hint}?")
    return found
