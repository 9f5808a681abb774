"""Where the user's arguments and the optimizers end the prefix."""

import pytest
import torch
from torch import nn

from lightning_egeria.errors import LayerChainError
from lightning_egeria.freezing.limits import depth_limit, one_optimizer, that_learn
from lightning_egeria.layers import LayerChain


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
    ("arguments", "limit"),
    [
        ({"max_frozen_fraction": 1.0}, 6),
        ({"max_frozen_fraction": 0.5}, 3),
        ({"max_frozen_fraction": 0.1}, 0),
        ({"freeze_until": "stem"}, 1),
        ({"freeze_until": "stages.1.0"}, 4),
        ({"freeze_until": "stages.1"}, 5),
        ({"freeze_until": "stages.2.1"}, 6),
        ({"never_freeze": ["stages.1"]}, 3),
        ({"never_freeze": ["stages.2.1", "stages.0.1"]}, 2),
        ({"never_freeze": ["stem"]}, 0),
        ({"freeze_until": "stages.1", "max_frozen_fraction": 0.3, "never_freeze": ["stages.2"]}, 2),
    ],
)
def test_limits(chain, arguments, limit):
    assert depth_limit(chain, **arguments) == limit


@pytest.mark.parametrize("argument", [{"freeze_until": "stage.1"}, {"never_freeze": ["stage.1"]}])
def test_an_unknown_name_is_told_with_near_ones(chain, argument):
    with pytest.raises(LayerChainError, match=rf"{next(iter(argument))}.*'stage\.1'; did you mean 'stages\."):
        depth_limit(chain, **argument)


def test_what_does_not_learn_needs_no_limit(net):
    net.stages[0][1].requires_grad_(False)
    net.norm = nn.Identity()
    paths = ["stages.0.1", "stages.0", "norm", "stagesss", "stages.0.1.weight"]
    assert that_learn(net, paths) == paths[1:]


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
