"""The answer to ``pretrained="auto"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.normalisation import looks_trained, of_trained_weights
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.freezing.policy import FreezingPolicy, Policy


def evidence(norms: Mapping[str, bool], module: nn.Module, chain: LayerChain) -> dict[str, bool]:
    """Return the normalisation layers of weights that train; those that the user froze say nothing about the others.

    Args:
        norms: whether each normalisation layer had left its initial values before the first forward, by path.
        module: the model.
        chain: its layer chain. Its parameters train, or did before they froze.
    """
    own = chain.parameters_of(module, len(chain)).values()
    return of_trained_weights(module, norms, [*own, *(one for one in module.parameters() if one.requires_grad)])


def answer_auto(policy: Policy, norms: Mapping[str, bool], chain: LayerChain, ranks: Ranks, notices: Notices) -> int:
    """Answer ``pretrained="auto"`` at the start of a run, the same on all ranks, and log the reason.

    Args:
        policy: the policy; only a `FreezingPolicy` has the question.
        norms: output of `evidence`.
        chain: the layer chain; its front half counts.
        ranks: the answer of rank 0 counts.
        notices: takes the log line.

    Returns:
        The largest depth that may freeze. If the weights are taken for pre-trained, that ends with the last layer
        module that shows trained statistics: a layer behind them, or one with initial statistics, may be new.
    """
    if not isinstance(policy, FreezingPolicy) or policy.pretrained != "auto":
        return chain.max_depth
    front = chain.members((len(chain) + 1) // 2)
    layers, depth = ranks.share([[norms[path] for path in front if path in norms], _trained_depth(norms, chain)])
    pretrained = looks_trained(layers) and depth > 0
    policy.resolve(pretrained)
    notices.inform(_what_norms_say(layers, pretrained))
    return min(chain.max_depth, depth) if pretrained else chain.max_depth


def _trained_depth(norms: Mapping[str, bool], chain: LayerChain) -> int:
    """Return the depth that ends with the last layer module with trained statistics, before the first with none."""
    depth = 0
    for index, layer_module in enumerate(chain.layer_modules):
        own = [norms[path] for path in layer_module.members if path in norms]
        if own and not any(own):
            break
        depth = index + 1 if own else depth
    return depth


def untrained_behind(norms: Mapping[str, bool], chain: LayerChain, ranks: Ranks) -> str | None:
    """Return the path of an untrained normalisation layer behind a trained front half, the same on all ranks.

    A large untrained part, such as a decoder, learns fast at first, which hides what layers in front of it would learn.

    Args:
        norms: output of `evidence`.
        chain: the layer chain.
        ranks: the answer of rank 0 counts.
    """
    front = chain.members((len(chain) + 1) // 2)
    trained = looks_trained(norms[path] for path in front if path in norms)
    untrained = [path for path, left in norms.items() if not left and path not in front] if trained else []
    found: str | None = ranks.share(untrained[0] if untrained else None)
    return found


def _what_norms_say(layers: Sequence[bool], pretrained: bool) -> str:
    """Return the log line of ``pretrained="auto"``.

    Args:
        layers: whether each normalisation layer of the front has left its initial values.
        pretrained: the answer.

    >>> _what_norms_say([True, True, False], True)  # doctest: +ELLIPSIS
    "pretrained='auto' takes the weights for pre-trained: 2 of 3 normalisation layers in the front half have left ..."
    """
    if not layers:
        return (
            "pretrained='auto' takes the weights for untrained: the front half has no normalisation layers that train. "
            "Pass FreezingPolicy(pretrained=True) if they are trained"
        )
    kind, other = ("pre-trained", False) if pretrained else ("untrained", True)
    return (
        f"pretrained='auto' takes the weights for {kind}: {sum(layers)} of {len(layers)} normalisation layers in the "
        f"front half have left their initial values. Pass FreezingPolicy(pretrained={other}) if that is wrong"
    )
