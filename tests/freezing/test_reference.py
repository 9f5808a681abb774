"""The reference model against the obvious slow way: a copy of the network, run by hand."""

import copy

import pytest
import torch
from torch import nn

from lightning_egeria.freezing.reference import InlineExecutor, NetworkCall, ReferenceModel
from lightning_egeria.freezing.similarity import gram_matrix
from lightning_egeria.layers import LayerChain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
        self.third = nn.Linear(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.head(self.third(self.second(self.first(x)) * scale))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def inputs():
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(2))


def chain_of(net, inputs):
    return LayerChain.trace(net, lambda: net(inputs).sum())


def calls(inputs, **kwargs):
    return [NetworkCall("", (inputs,), kwargs, output=None)]


def by_hand(net, inputs, samples):
    net = copy.deepcopy(net).eval()
    with torch.no_grad():
        first = net.first(inputs)
        second = net.second(first)
        return [gram_matrix(a[:samples]) for a in (first, second, net.third(second))]


@pytest.mark.parametrize("samples", [4, 10, 64])
def test_boundaries_of_a_snapshot_in_evaluation_mode(net, inputs, samples):
    reference = ReferenceModel(net, chain_of(net, inputs), samples)
    expected = by_hand(net, inputs, samples)
    nn.init.zeros_(net.third.weight)  # the snapshot does not follow the model
    for _ in range(2):  # the first call tries whether fewer samples do, the second uses what it found
        for found, wanted in zip(reference.boundary_grams(calls(inputs)), expected, strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)


def test_refresh_takes_over_weights_and_buffers(net, inputs):
    reference = ReferenceModel(net, chain_of(net, inputs), 10)
    with torch.no_grad():
        net.first[0].weight.mul_(-1)
        net.first[1].running_mean.add_(1)
    reference.refresh(net)
    for found, wanted in zip(reference.boundary_grams(calls(inputs)), by_hand(net, inputs, 10), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_the_model_and_the_random_state_stay_as_they_were(net, inputs):
    chain = chain_of(net, inputs)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    reference = ReferenceModel(net, chain, 4)
    reference.boundary_grams(calls(inputs))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any("forward" in vars(module) for module in net.modules())


def test_keyword_arguments_reach_the_network(net, inputs):
    reference = ReferenceModel(net, chain_of(net, inputs), 10)
    plain, scaled = (reference.boundary_grams(calls(inputs, scale=scale)) for scale in (1.0, torch.randn(5)))
    assert torch.equal(plain[1], scaled[1])
    assert not torch.allclose(plain[2], scaled[2])


def test_a_network_that_mixes_its_samples_sees_the_whole_batch(inputs):
    class Mixes(Net):
        def forward(self, x, scale=1.0):
            return super().forward(x - x.mean(0), scale)

    torch.manual_seed(0)
    net = Mixes()
    reference = ReferenceModel(net, chain_of(net, inputs), 4)
    wanted = by_hand(net, inputs - inputs.mean(0), 4)
    for _ in range(2):
        for found, gram in zip(reference.boundary_grams(calls(inputs)), wanted, strict=True):
            assert torch.allclose(found, gram, atol=1e-6)


def test_an_output_given_to_a_later_call_is_the_reference_s_own(net, inputs):
    whole = nn.ModuleDict({"encoder": net.first, "decoder": nn.Sequential(net.second, net.third, net.head)})
    chain = LayerChain.trace(whole, lambda: whole["decoder"](whole["encoder"](inputs)).sum())
    encoded = torch.randn(10, 5)  # of the model in training, which differs from the reference
    reference = ReferenceModel(whole, chain, 64)
    found = reference.boundary_grams(
        [NetworkCall("encoder", (inputs,), {}, encoded), NetworkCall("decoder", (encoded,), {}, None)]
    )
    for gram, wanted in zip(found, by_hand(net, inputs, 64), strict=True):
        assert torch.allclose(gram, wanted, atol=1e-6)


def test_an_activation_kept_on_the_module_does_not_hinder_the_copy(net, inputs):
    chain = chain_of(net, inputs)
    net.first.kept = net.first(inputs)
    ReferenceModel(net, chain, 4)


def test_inline_executor():
    executor = InlineExecutor()
    assert executor.submit(pow, 2, 3).result() == 8
    assert isinstance(executor.submit(int, "no number").exception(), ValueError)
