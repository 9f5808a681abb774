"""Frozen fronts of small networks."""

import torch
from lazies import Source
from programs.parts import Net

from lightning_egeria.caching.front import Front
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.prefix import FrozenPrefix


def frozen(net, depth=2, x=None):
    """The prefix of a network, frozen to a depth and in evaluation mode."""
    example = torch.randn(4, 8) if x is None else x
    prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: net(example).sum()))
    prefix.set_depth(depth)
    return prefix


def new_front(depth=2, net=None):
    """A front of `Net` from the seed 0."""
    if net is None:
        torch.manual_seed(0)
        net = Net()
    return Front(frozen(net, depth), depth)


class Batch:
    """Of lazy inputs; serves ``output`` at the deepest boundary, or has it computed if that is None."""

    eager = False

    def __init__(self, front, output=None, *, inputs, outside=False, keys=None, reads=()):
        self.front, self.output, self.outside, self.reads = front, output, outside, reads
        self.source = Source(inputs, keys=keys, owner=self)
        self.tape = self.source.tape
        self.boundaries, self.keys, self.computed, self.entered = [], [], [], False
        front.begin(self)

    def takes_outside(self, unit):
        return self.outside

    def enter(self):
        self.entered = True

    def boundary(self, depth, node):
        self.boundaries.append(depth)
        self.keys.append(node.key)
        return self.output if depth == self.front.depth else None

    def reached(self, node, value):
        self.computed.append(value)
        return value

    def finish(self):
        """Nothing is held."""
