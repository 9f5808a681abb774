"""Changes of attributes are noticed and taken back."""

import torch
from torch import nn

from lightning_egeria.methods.pipelining.attributes import Attributes


def test_each_kind_of_change_is_named_and_taken_back():
    net = nn.BatchNorm1d(2)
    net.count, net.seen, net.best = 0, [], {"a": 1}
    before = Attributes(net)
    assert before.restore() == []
    net.count += 1
    net.seen.append(1)
    net.best["b"] = 2
    net.new = 3
    net(torch.randn(4, 2))
    assert sorted(before.restore()) == ["_buffers", "best", "count", "new", "seen"]
    assert (net.count, net.seen, net.best, hasattr(net, "new")) == (0, [], {"a": 1}, False)


def test_a_change_inside_a_tensor_is_noticed():
    net = nn.Module()
    net.queue = torch.zeros(3)
    before = Attributes(net)
    net.queue[0] = 1
    assert before.restore() == ["queue"]
