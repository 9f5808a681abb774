"""Layer modules run without gradient for a batch: the rest gets its gradient, and nothing else is different."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.paused import PausedPrefix
from lightning_egeria.errors import UnsupportedError
from support.networks import EVERY_GRADIENT, Towers, UNet, deep_mlp, depths_of, gradients, images, step, traced

# ``torch.matmul`` folds the batch of an input that needs a gradient and of no other, and the two round differently:
# such a step is that of the same prefix frozen by hand, bit for bit, and of the whole one but for rounding.
ROUNDED = ("tokens", "nn.TransformerEncoder", "nn.Transformer")


def same(got, wanted, exact):
    if exact:
        return torch.equal(got, wanted)
    return float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def run(net, inputs, depth=0, chain=None):
    """One step from the same state; returns gradients, buffers and the loss."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.zero_grad()
    paused = PausedPrefix(net, chain) if chain is not None else None
    if paused is not None:
        paused.pause(depth)
    loss = step(net, inputs)
    loss.backward()
    if paused is not None:
        paused.end()
    found = gradients(net), {name: value.clone() for name, value in net.named_buffers()}, loss.item()
    net.load_state_dict(before)
    return found


@pytest.mark.parametrize("name", EVERY_GRADIENT)
def test_the_suffix_has_the_gradient_of_a_whole_step(name):
    net, inputs, chain = traced(name)
    whole, buffers, loss = run(net, inputs)
    exact = name not in ROUNDED
    for depth in depths_of(chain, chain.max_depth):
        got, moved, found = run(net, inputs, depth, chain)
        paused = set(chain.prefix_parameters(depth))
        assert {path for path in whole if got[path] is None and whole[path] is not None} == paused
        assert all(same(got[path], whole[path], exact) for path in whole.keys() - paused if whole[path] is not None)
        assert all(same(moved[path], value, exact) for path, value in buffers.items())
        assert found == pytest.approx(loss, rel=0 if exact else 1e-5, abs=0)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_step_is_that_of_a_prefix_frozen_by_hand(name):
    net, inputs, chain = traced(name)
    parameters = dict(net.named_parameters())
    for depth in depths_of(chain, chain.max_depth):
        got, _, loss = run(net, inputs, depth, chain)
        for path in chain.prefix_parameters(depth):
            parameters[path].requires_grad_(False)
        by_hand, _, found = run(net, inputs)
        net.requires_grad_(True)
        assert found == loss
        assert got.keys() == by_hand.keys()
        assert all(torch.equal(got[path], value) for path, value in by_hand.items() if value is not None)


@pytest.mark.parametrize(("make", "inputs"), [(UNet, lambda: images(16)), (Towers, lambda: torch.rand(5, 4))])
def test_skip_connections_cross_the_boundary(make, inputs):
    torch.manual_seed(0)
    net, inputs = make(), (inputs(),)
    chain = LayerChain.trace(net, lambda: step(net, inputs))
    whole, _, _ = run(net, inputs)
    for depth in range(1, chain.max_depth + 1):
        got, _, _ = run(net, inputs, depth, chain)
        behind = whole.keys() - set(chain.prefix_parameters(depth))
        assert all(torch.equal(got[name], whole[name]) for name in behind)


class TestOneNetwork:
    @pytest.fixture
    def net(self):
        return deep_mlp()

    @pytest.fixture
    def paused(self, net):
        return PausedPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))

    def test_modes_stay(self, net, paused):
        paused.pause(2)
        assert all(part.training for part in net.modules())

    def test_nothing_is_stored_in_front_of_the_boundary(self, net, paused):
        paused.pause(2)
        assert not net[:4](torch.rand(5, 4)).requires_grad
        assert net(torch.rand(5, 4)).requires_grad

    def test_the_user_s_frozen_parameters_stay_frozen(self, net, paused):
        net[0].weight.requires_grad_(False)
        paused.pause(1)
        paused.end()
        paused.add_zero_gradients()
        assert [p.requires_grad for p in net[0].parameters()] == [False, True]
        assert [p.grad is None for p in net[0].parameters()] == [True, False]

    def test_a_gradient_that_is_there_stays(self, net, paused):
        step(net, (torch.rand(5, 4),)).backward()
        before = gradients(net)
        paused.pause(2)
        paused.end()
        paused.add_zero_gradients()
        assert all(torch.equal(p.grad, before[name]) for name, p in net.named_parameters())

    def test_a_pause_replaces_the_one_before(self, net, paused):
        paused.pause(2)
        paused.pause(1)
        held = {name for name, p in net.named_parameters() if not p.requires_grad}
        assert held == set(paused.chain.prefix_parameters(1))
        paused.pause(0)
        assert not paused.active
        assert all(p.requires_grad for p in net.parameters())

    @pytest.mark.parametrize("depth", [-1, 3])
    def test_a_depth_out_of_range_is_refused(self, paused, depth):
        with pytest.raises(ValueError, match=r"depth must be in 0\.\.2"):
            paused.pause(depth)


def test_sparse_gradients_are_refused():
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    ids = torch.randint(0, 9, (5,))
    paused = PausedPrefix(net, LayerChain.trace(net, lambda: net(ids).sum()))
    paused.check_gradients()  # there are none
    net(ids).sum().backward()
    with pytest.raises(UnsupportedError, match=r"'0\.weight' has a sparse gradient"):
        paused.check_gradients()
