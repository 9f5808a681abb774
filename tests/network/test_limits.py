"""Where the user's arguments and the optimizers end the prefix."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.limits import depth_limit, one_optimizer
from lightning_egeria.errors import LayerChainError


@pytest.fixture
def net():
    net = nn.Module()
    net.stem = nn.Linear(2, 2)
    net.stages = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)])
    net.head = nn.Linear(2, 2)
    return net


@pytest.fixture
def chain(net):
    def step():
        x = net.stem(torch.ones(3, 2))
        for stage in net.stages:
            x = stage(x)
        return net.head(x).sum()

    return LayerChain.trace(net, step)


def test_the_chain(chain):
    assert chain.names == ("stem", *(f"stages.{i}.{j}" for i in range(3) for j in range(2)))
    assert depth_limit(chain) == chain.max_depth == 6


@pytest.mark.parametrize(
    ("freeze_until", "limit"),
    [
        (None, 6),
        (1.0, 6),
        (1, 6),
        (0.5, 3),
        (0.1, 0),
        ("stem", 1),
        ("stages.1.0", 4),
        ("stages.1", 5),
        ("stages.2.1", 6),
    ],
)
def test_limits(chain, freeze_until, limit):
    assert depth_limit(chain, freeze_until) == limit


def test_an_unknown_name_is_told_with_near_ones(chain):
    with pytest.raises(LayerChainError, match=r"freeze_until: 'stage\.1' matches .* Did you mean 'stages\."):
        depth_limit(chain, "stage.1")


def test_the_prefix_ends_where_another_optimizer_begins(chain, net):
    def optimizers(*parts):
        return [torch.optim.SGD([p for part in group for p in part.parameters()], lr=0.1) for group in parts]

    named = dict(net.named_parameters())
    shorter = one_optimizer(chain, named, optimizers([net.stem, net.stages[0]], [net.stages[1], net.stages[2]]))
    assert shorter.max_depth == 3
    assert "'stages.1.0' belongs to another optimizer" in shorter.notes[0]
    assert one_optimizer(chain, named, optimizers([net.stem, net.stages], [net.head])) == chain
    # A part that no optimizer has does not matter.
    assert one_optimizer(chain, named, optimizers([net.stages], [net.head])) == chain
    assert one_optimizer(chain, named, []) == chain
