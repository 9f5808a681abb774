"""One suffix after the other, without a Trainer."""

import pytest
import torch

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.partial.plans import TemporalPlan
from lightning_egeria.methods.partial.steps import SuffixSteps
from support.networks import deep_mlp, step

INPUTS = (torch.linspace(-1, 1, 20).reshape(5, 4),)


@pytest.fixture
def net():
    return deep_mlp()


@pytest.fixture
def steps(net):
    chain = LayerChain.trace(net, lambda: step(net, INPUTS))
    return SuffixSteps(net, chain, TemporalPlan(1, 1 / 3), [0] * len(chain))


def held(net):
    return {name for name, p in net.named_parameters() if not p.requires_grad}


def train(net, steps, number):
    net.zero_grad()
    steps.batch_start(None, number)
    loss = step(net, INPUTS)
    steps.forward_end(loss)
    loss.backward()
    steps.backward_end()


def test_each_step_has_its_own_depth(steps):
    assert [steps.depths_at(number) for number in range(5)] == [(0,), (1,), (2,), (0,), (1,)]


def test_paused_parameters_have_a_gradient_of_zero(net, steps):
    chain = LayerChain.trace(net, lambda: step(net, INPUTS))
    for number in range(3):
        train(net, steps, number)
        front = set(chain.prefix_parameters(steps.depths_at(number)[0]))
        zero = {name for name, p in net.named_parameters() if not p.grad.any()}
        assert front <= zero
        assert not any(name in zero for name in ("9.weight", "9.bias"))
        assert held(net) == set()


def test_contributions_are_counted(net, steps):
    for number in range(4):
        train(net, steps, number)
        steps.batch_end()
        steps.optimizer_step(number + 1)
    assert steps.contributions == [2, 3, 4]


@pytest.mark.parametrize("end", ["batch_end", "abort"])
def test_a_batch_without_backward_is_undone(net, steps, end):
    steps.batch_start(None, 2)
    assert held(net) != set()
    getattr(steps, end)()
    assert held(net) == set()


def test_a_second_backward_is_refused(net, steps):
    train(net, steps, 1)
    with pytest.raises(UnsupportedError, match="ran the training step more than once in step 1"):
        steps.forward_end(step(net, INPUTS))


def test_a_suffix_that_does_not_train_is_refused(net, steps):
    net[7:].requires_grad_(False)
    steps.batch_start(None, 2)
    with pytest.raises(
        UnsupportedError, match="no parameter trains in the last 1 layer modules and the head, and step 2 has"
    ):
        steps.forward_end(step(net, INPUTS))


def test_no_more_than_the_largest_depth_is_paused(net):
    chain = LayerChain.trace(net, lambda: step(net, INPUTS) + net[4].weight.square().sum())  # a penalty on a weight
    assert chain.max_depth == 1
    steps = SuffixSteps(net, chain, TemporalPlan(1, 0.01), [0] * len(chain))
    assert [steps.depths_at(number) for number in range(3)] == [(0,), (1,), (1,)]
