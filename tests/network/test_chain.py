"""Layer chains of many models, held against autograd itself."""

import copy
import json
import re

import pytest
import timm
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import LayerChainError
from support.networks import (
    LENGTHS,
    MODELS,
    Towers,
    UNet,
    assert_same_attributes,
    attributes,
    deep_mlp,
    depths_of,
    images,
    mlp,
    prefixes_by_autograd,
    step,
    traced,
)


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_agrees_with_autograd(name):
    net, inputs, chain = traced(name)
    assert len(chain) == LENGTHS[name]
    assert chain.max_depth == len(chain) - 1
    assert len(set(chain.names)) == len(chain)
    depths = depths_of(chain, len(chain))
    prefixes, used = prefixes_by_autograd(net, inputs, chain, depths)
    for depth, expected in prefixes.items():
        parameters = chain.prefix_parameters(depth)
        assert len(set(parameters)) == len(parameters)
        assert set(parameters) == expected, f"depth {depth}"
    assert all(layer_module.parameters for layer_module in chain.layer_modules)
    assert prefixes[len(chain)] < used, "the head must be left"


@pytest.mark.parametrize("name", ["tokens", "resnet18", "timm levit"])
def test_tracing_changes_nothing(name):
    torch.manual_seed(0)
    net, inputs = MODELS[name]()
    before = attributes(net)
    expected = step(copy.deepcopy(net), inputs)
    losses = []

    def run():
        losses.append(step(net, inputs))
        return losses[-1]

    LayerChain.trace(net, run)
    assert torch.equal(losses[0], expected)
    assert_same_attributes(before, net)


def test_a_step_that_raises_leaves_the_modules_as_they_were():
    net = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        LayerChain.trace(net, lambda: step(net, (torch.rand(2, 5),)))
    assert all("forward" not in vars(part) for part in net.modules())


class TestWhatIsUsedBehind:
    """Something else than its last output may leave a prefix."""

    @pytest.mark.parametrize("low_precision", [False, True])
    def test_in_a_chain_only_the_next_uses_what_one_computes(self, low_precision):
        net = timm.create_model("resnet18", num_classes=3)

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
                return net(torch.randn(2, 3, 32, 32)).sum()

        chain = LayerChain.trace(net, step)
        assert [one.last_use for one in chain.layer_modules] == list(range(1, len(chain) + 1))
        values = tuple(float(value) for value in torch.rand(len(chain)))
        assert chain.of_prefixes(values, 0) == values

    def test_two_towers(self):
        net = Towers()
        chain = LayerChain.trace(net, lambda: net(torch.randn(3, 4)).sum())
        assert chain.names == ("image.0", "image.2", "text.0", "text.2")
        assert [one.last_use for one in chain.layer_modules] == [1, 4, 3, 4]
        assert chain.of_prefixes([9.0, 5.0, 2.0, 7.0], 0) == (9.0, 5.0, 5.0, 7.0)
        # What is frozen does not move.
        assert chain.of_prefixes([float("nan"), float("nan"), 2.0, 7.0], 2)[2:] == (2.0, 7.0)

    def test_skip_connections(self):
        net = UNet()
        chain = LayerChain.trace(net, lambda: net(images(16)).sum())
        last = {one.name: one.last_use for one in chain.layer_modules}
        assert last == {"down1": 4, "down2": 3, "middle": 3, "up2": 4, "up1": 5}

    def test_an_encoder_that_every_layer_of_the_decoder_looks_at(self):
        net = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
        chain = LayerChain.trace(net, lambda: net(torch.randn(2, 5, 8), torch.randn(2, 4, 8)).sum())
        assert [one.last_use for one in chain.layer_modules] == [1, 4, 3, 4]
        assert chain.of_prefixes([9.0, 5.0, 2.0, 7.0], 0) == (9.0, 5.0, 5.0, 7.0)

    def test_a_second_head_counts_to_the_end(self):
        net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("first", "aside", "second", "third", "head")})

        def step():
            x = net["first"](torch.randn(2, 4)).tanh()
            beside = net["aside"](x)
            return net["head"](net["third"](net["second"](x).tanh()).tanh()).sum() + beside.sum()

        chain = LayerChain.trace(net, step)
        assert dict(zip(chain.names, (one.last_use for one in chain.layer_modules), strict=True)) == {
            "first": 2,
            "aside": 4,
            "second": 3,
            "third": 4,
        }


class TestTooSmall:
    @pytest.mark.parametrize("layers", [1, 2])
    def test_fewer_than_two_layer_modules(self, layers):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        with pytest.raises(LayerChainError, match=r"Sequential has .*, expected at least 2"):
            LayerChain.trace(net, lambda: net(torch.rand(2, 4)).sum())

    def test_nothing_trains(self):
        net = mlp().requires_grad_(False)
        with pytest.raises(LayerChainError, match="no trainable parameter"):
            LayerChain.trace(net, lambda: net(torch.rand(2, 4)).sum())

    def test_the_loss_has_nothing_to_do_with_the_network(self):
        net, other = mlp(), nn.Parameter(torch.ones(1))
        with pytest.raises(LayerChainError, match="Sequential has no layer modules"):
            LayerChain.trace(net, lambda: (net(torch.rand(2, 4)).detach().sum() * other).sum())


@pytest.mark.parametrize("name", ["used twice", "resnet18", "nn.Transformer"])
def test_chain_state_round_trip(name):
    chain = traced(name)[2]
    assert LayerChain.from_state(json.loads(json.dumps(chain.to_state()))) == chain


def test_a_chain_from_a_checkpoint_must_fit():
    net, _, chain = traced("mlp")
    assert chain.contradiction(net) is None
    assert chain.contradiction(deep_mlp()) is None
    assert re.fullmatch(
        r"Sequential lacks '\S+' and \d+ more", chain.contradiction(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    )
    assert "lacks '8'" in chain.contradiction(nn.Sequential(*deep_mlp()[:8]))


def test_a_chain_must_be_of_what_trains():
    net, _, chain = traced("mlp")
    names = [name for name, _ in net.named_parameters()]
    assert chain.contradiction(net, names) is None
    assert chain.contradiction(net, names[2:]) is None  # more may train
    net[0].requires_grad_(False)
    assert chain.contradiction(net, names[2:]) is None
    assert "trained when the checkpoint was written, and does not now" in chain.contradiction(net, names)
