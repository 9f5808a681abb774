"""The first step shows the layer chain, to the rank that looks and to those that are told."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.search import FirstStep
from lightning_egeria.errors import LayerChainError, TooFewLayersError
from support.networks import assert_same_attributes, attributes, deep_mlp


class Rank:
    """One of two ranks; what the first shares is in `told`."""

    several = True

    def __init__(self, leads, told):
        self.leads, self.told = leads, told

    def share(self, value):
        if self.leads:
            self.told.append(value)
        return self.told[-1]


@pytest.fixture
def told():
    return []


@pytest.fixture
def net():
    return deep_mlp()


def loss_of(net):
    return net(torch.rand(5, 4)).sum()


def found_by(leads, net, told, **arguments):
    first = FirstStep(net, Rank(leads, told))
    loss = loss_of(net)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1)]
    return first.chain(loss, optimizers, **arguments)


def test_it_finds_the_chain_of_the_step(net, told):
    expected = LayerChain.trace(net, lambda: loss_of(net))
    assert found_by(True, net, told) == expected


def test_other_ranks_have_the_same_without_looking(net, told, monkeypatch):
    found = found_by(True, net, told)
    monkeypatch.setattr("lightning_egeria.core.training.search.StepTrace", None)
    assert found_by(False, net, told) == found


def test_arguments_of_the_user_count(net, told):
    chain = found_by(True, net, told, layer_modules=["0", "4", "7"], freeze_until=0.5)
    assert chain.names == ("0", "4", "7")
    assert chain.max_depth == 1
    assert found_by(True, net, told, freeze_until="0").max_depth == 1


def test_it_leaves_the_modules_as_they_were(net, told):
    before = attributes(net)
    found_by(True, net, told)
    assert_same_attributes(before, net)


def test_a_step_that_breaks_off_is_left_by_stop(net, told):
    before = attributes(net)
    first = FirstStep(net, Rank(True, told))
    assert "forward" in vars(net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.rand(5, 3))
    first.stop()
    first.stop()
    assert_same_attributes(before, net)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"layer_modules": ["nowhere"]}, LayerChainError, "no module 'nowhere'"),
        ({"small": True}, TooFewLayersError, "at least 2"),
    ],
)
def test_an_error_is_one_on_all_ranks(told, arguments, error, text):
    net = nn.Sequential(nn.Linear(4, 2)) if arguments.pop("small", False) else deep_mlp()
    with pytest.raises(error, match=text):
        found_by(True, net, told, **arguments)
    with pytest.raises(error, match=f"on rank 0: .*{text}") as caught:
        found_by(False, net, told, **arguments)
    assert type(caught.value) is error


def test_nothing_is_gathered_without_shards(net, told):
    first = FirstStep(net, Rank(True, told))
    assert first.weights is None
    first.stop()
