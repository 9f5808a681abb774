"""Frozen fronts of small networks."""

import torch
from programs.parts import Net

from lightning_egeria.caching.front import Front
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.prefix import FrozenPrefix


def frozen(net, depth=2, x=None):
    """The prefix of a network, frozen to a depth and in evaluation mode."""
    example = torch.randn(4, 8) if x is None else x
    prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: net(example).sum()))
    prefix.set_depth(depth)
    prefix.eval_all()
    return prefix


def new_front(depth=2, net=None):
    """A front of `Net` from the seed 0."""
    if net is None:
        torch.manual_seed(0)
        net = Net()
    return Front(frozen(net, depth), depth)
