"""Boundary activations are seen as they pass, and change nothing."""

import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.passing import BoundaryObserver
from support.networks import assert_same_attributes, attributes, deep_mlp


class Seen(BoundaryObserver):
    def __init__(self, net, chain, first=0):
        super().__init__(dict(net.named_modules()), chain, first)
        self.activations = []

    def boundary_reached(self, index, activation):
        self.activations.append((index, activation))


def traced(net):
    return LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum())


def test_each_boundary_is_seen_in_order():
    net = deep_mlp()
    seen = Seen(net, traced(net))
    seen.start()
    net(torch.rand(5, 4))
    seen.stop()
    assert [index for index, _ in seen.activations] == [0, 1, 2]
    assert [tuple(activation.shape) for _, activation in seen.activations] == [(5, 6)] * 3


def test_the_activation_is_that_of_the_module():
    net = deep_mlp()
    seen = Seen(net, traced(net))
    net.eval()
    seen.start()
    x = torch.rand(5, 4)
    output = net(x)
    seen.stop()
    assert torch.equal(output, net(x))
    for (_, activation), end in zip(seen.activations, (4, 7, 9), strict=True):
        assert torch.equal(activation, net[:end](x))


def test_the_front_can_be_left_out():
    net = deep_mlp()
    seen = Seen(net, traced(net), first=2)
    seen.start()
    net(torch.rand(5, 4))
    seen.stop()
    assert [index for index, _ in seen.activations] == [2]


class Two(nn.Module):
    """Hands on one tensor of two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x.detach(), {"kept": self.linear(x)}


class Picking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Two(), Two(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x)[1]["kept"])[1]["kept"])


def test_the_leaf_that_the_chain_names_is_taken():
    net = Picking()
    chain = LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum(), ["first", "second"])
    assert [one.output_leaf for one in chain.layer_modules] == [1, 1]
    seen = Seen(net, chain)
    seen.start()
    x = torch.rand(5, 4)
    net(x)
    seen.stop()
    assert torch.equal(seen.activations[0][1], net.first.linear(x))


def test_stop_leaves_the_modules_as_they_were():
    net = deep_mlp()
    before, seen = attributes(net), Seen(net, traced(net))
    seen.start()
    seen.stop()
    seen.stop()
    assert_same_attributes(before, net)
    net(torch.rand(5, 4))
    assert seen.activations == []
