"""Weights are copied while FSDP2 has them gathered. `test_fsdp.py` has FSDP2 itself."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.distributed.gathering import GatheredWeights, fill
from support.networks import assert_same_attributes, attributes


class Shard(torch.Tensor):
    """One rank's part of a larger tensor."""

    def full_tensor(self):
        return self


class FSDPModule:
    """Of the name by which FSDP2's mix-in is known."""


class Unit(FSDPModule, nn.Linear):
    """Has whole weights only during its forward, as a unit of FSDP2."""

    def forward(self, x):
        assert not hasattr(self.weight, "full_tensor")
        return super().forward(x)


@pytest.fixture
def net():
    return nn.Sequential(Unit(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_weights_of_sharded_parts_and_all_buffers_are_copied(net):
    gathered = GatheredWeights(net)
    gathered.start()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net(torch.rand(4, 3))
    gathered.stop()
    assert set(gathered.weights) == {"0.weight", "0.bias"}
    assert torch.equal(gathered.weights["0.weight"], net[0].weight)
    # The forward has moved the statistics; the reference takes those of before.
    assert not torch.equal(before["1.running_mean"], net[1].running_mean)
    assert before.keys() == gathered.buffers.keys()
    assert all(torch.equal(gathered.buffers[name], value) for name, value in before.items())


def test_copies_do_not_follow_the_weights(net):
    gathered = GatheredWeights(net)
    gathered.start()
    net(torch.rand(4, 3))
    gathered.stop()
    before = gathered.weights["0.weight"].clone()
    with torch.no_grad():
        net[0].weight += 1
    assert torch.equal(gathered.weights["0.weight"], before)


def test_the_modules_are_left_as_they_were(net):
    before = attributes(net)
    gathered = GatheredWeights(net)
    gathered.start()
    gathered.stop()
    gathered.stop()
    assert_same_attributes(before, net)


def test_fill_puts_gathered_weights_in_the_place_of_shards():
    shard, plain, buffer = torch.zeros(1).as_subclass(Shard), torch.ones(2), torch.full((3,), 2.0)
    names = {id(shard): "weight", id(buffer): "mean"}
    weights = {"weight": torch.full((4,), 5.0), "mean": torch.full((3,), 6.0)}
    filled = fill([plain, shard, buffer], names, weights)
    assert filled[0] is plain
    assert filled[1] is weights["weight"]
    assert filled[2] is weights["mean"]


def test_fill_refuses_a_shard_that_was_not_gathered():
    shard = torch.zeros(1).as_subclass(Shard)
    with pytest.raises(KeyError, match="weight"):
        fill([shard], {id(shard): "weight"}, {})
