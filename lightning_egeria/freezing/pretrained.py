"""The answer to ``pretrained="auto"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_egeria.distributed.ranks import Ranks
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.normalisation import looks_trained
from lightning_egeria.training.notices import Notices


def answer_auto(
    policy: Policy,
    before: Policy | None,
    norms: Mapping[str, bool] | None,
    chain: LayerChain,
    ranks: Ranks,
    notices: Notices,
) -> None:
    """Answer ``pretrained="auto"`` of a policy that begins anew, the same on all ranks; log what was seen.

    Args:
        policy: the policy; others than `FreezingPolicy` are not asked.
        before: policy that was active until now; its answer stays without ``norms``.
        norms: whether each normalisation layer had left its initial values before the first forward, by path; None
            after resuming.
        chain: the layer chain; its front half counts.
        ranks: the answer of rank 0 counts.
        notices: takes the log line.
    """
    if not isinstance(policy, FreezingPolicy) or policy.pretrained != "auto":
        return
    if norms is None:  # the chain was found again after resuming
        policy.resolve(isinstance(before, FreezingPolicy) and before.pretrained is True)
        return
    front = chain.members((len(chain) + 1) // 2)
    layers: list[bool] = ranks.share([norms[path] for path in front if path in norms])
    pretrained = looks_trained(layers)
    policy.resolve(pretrained)
    notices.inform(_what_norms_say(layers, pretrained))


def untrained_behind(norms: Mapping[str, bool] | None, chain: LayerChain, ranks: Ranks) -> str | None:
    """Return the path of an untrained normalisation layer behind a trained front half, the same on all ranks.

    What a large untrained part learns at first, a decoder say, hides what the layers in front of it would learn.

    Args:
        norms: as in `answer_auto`.
        chain: the layer chain.
        ranks: the answer of rank 0 counts.
    """
    if norms is None:
        return None
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
            "pretrained='auto' takes the weights for untrained: the front half has no normalisation layers to tell. "
            "Pass FreezingPolicy(pretrained=True) if they are trained"
        )
    kind, other = ("pre-trained", False) if pretrained else ("untrained", True)
    return (
        f"pretrained='auto' takes the weights for {kind}: {sum(layers)} of {len(layers)} normalisation layers in the "
        f"front half have left their initial values. Pass FreezingPolicy(pretrained={other}) if that is wrong"
    )
