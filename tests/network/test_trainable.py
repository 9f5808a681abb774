"""Which parameters learn, and how fast the front does."""

import math

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.trainable import TrainableParameters, nothing_trains, without_part_in


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture
def known(net):
    known = TrainableParameters()
    known.note(net)
    return known


def test_nothing_new_at_first(net, known):
    assert known.new_in(net) == []


def test_parameters_that_are_released_are_new(net):
    net[0].requires_grad_(False)
    known = TrainableParameters()
    known.note(net)
    net[0].requires_grad_(True)
    assert known.new_in(net) == ["0.bias", "0.weight"]
    known.note(net)
    assert known.new_in(net) == []


def test_parameters_that_are_frozen_are_not_new(net, known):
    net[1].requires_grad_(False)
    assert known.new_in(net) == []


def test_added_modules_are_new(net, known):
    net.append(nn.Linear(2, 1, bias=False))
    assert known.new_in(net) == ["3.weight"]


def groups(net, *rates):
    return torch.optim.SGD([{"params": part.parameters(), "lr": rate} for part, rate in zip(net, rates, strict=True)])


def test_the_learning_rate_is_that_of_the_followed_group(net, known):
    optimizer = groups(net, 0.1, 0.2, 0.3)
    assert known.learning_rate([optimizer]) == 0.1
    known.follow("1.bias", [optimizer])
    assert known.learning_rate([optimizer]) == 0.2
    optimizer.param_groups[1]["lr"] = 0.05
    assert known.learning_rate([optimizer]) == 0.05


def test_the_followed_group_may_be_of_a_later_optimizer(net, known):
    optimizers = [torch.optim.SGD(part.parameters(), lr=rate) for part, rate in zip(net, (0.1, 0.2, 0.3), strict=True)]
    known.follow("2.weight", optimizers)
    assert known.learning_rate(optimizers) == 0.3


def test_a_parameter_of_no_optimizer_follows_the_first_group(net, known):
    optimizers = [torch.optim.SGD(net[1].parameters(), lr=0.2)]
    known.follow("0.weight", optimizers)
    assert known.learning_rate(optimizers) == 0.2


@pytest.mark.parametrize("groups", [[], [{"params": []}], [{"params": [], "lr": None}], [{"params": [], "lr": "auto"}]])
def test_an_optimizer_without_a_learning_rate_has_none(known, groups):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups = groups
    assert math.isnan(known.learning_rate([optimizer]))


def test_no_optimizer_no_learning_rate(known):
    assert math.isnan(known.learning_rate([]))


def test_a_learning_rate_may_be_a_tensor(net, known):
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.25), foreach=False)
    assert known.learning_rate([optimizer]) == 0.25


def test_nothing_trains_meanwhile(net):
    net[0].weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in net.parameters()]
    with nothing_trains(net):
        assert net(torch.ones(1, 2)).requires_grad is False
        assert torch.is_grad_enabled()
    assert [parameter.requires_grad for parameter in net.parameters()] == before


class TestWithoutPart:
    def test_all_take_part(self, net):
        assert without_part_in(net(torch.ones(1, 2)).sum(), net) == []

    def test_a_module_that_is_not_called(self, net):
        assert without_part_in(net[2](net[0](torch.ones(1, 2))).sum(), net) == ["1.weight", "1.bias"]

    def test_frozen_parameters(self, net):
        net[0].requires_grad_(False)
        assert without_part_in(net(torch.ones(1, 2)).sum(), net) == ["0.weight", "0.bias"]

    def test_a_detached_front(self, net):
        hidden = net[1](net[0](torch.ones(1, 2))).detach()
        assert without_part_in(net[2](hidden).sum(), net) == ["0.weight", "0.bias", "1.weight", "1.bias"]

    def test_without_a_graph_it_goes_by_requires_grad(self, net):
        net[0].requires_grad_(False)
        assert without_part_in(torch.ones(()), net) == ["0.weight", "0.bias"]

    def test_a_low_precision_copy_counts_as_the_weight(self, net):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.ones(1, 2)).float().sum()
        assert without_part_in(loss, net) == []
