"""The network of a snapshot, in each precision, against the network itself."""

import copy

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.calls import EarlierOutput, NetworkCall
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.freezing.precision import GramRecorder, SnapshotNetwork
from lightning_egeria.freezing.similarity import gram_distance, gram_matrix
from support.networks import Encoder, deep_mlp, ids


@pytest.fixture
def net():
    net = deep_mlp()
    for _ in range(10):
        net(torch.rand(20, 4))  # statistics that are not those of the start
    return net


@pytest.fixture
def x():
    return torch.rand(6, 4)


def snapshot_of(net, precision="float32", samples=64):
    return SnapshotNetwork({"": copy.deepcopy(net)}, chain_of(net), samples, precision)


def chain_of(net):
    other = copy.deepcopy(net).train()
    return LayerChain.trace(other, lambda: other(torch.rand(6, 4)).sum())


def expected_grams(net, x):
    net = copy.deepcopy(net).eval()
    return [gram_matrix(net[:end](x)) for end in (4, 7, 9)]


def test_float32_is_the_network_in_evaluation_mode(net, x):
    grams, batch_size = snapshot_of(net).boundary_grams([NetworkCall("", (x,), {})])
    assert batch_size == 6
    assert all(map(torch.equal, grams, expected_grams(net, x)))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_lower_precisions_are_close(net, x, precision):
    lowered = snapshot_of(net).lowered(precision)
    grams, _ = lowered.boundary_grams([NetworkCall("", (x,), {})])
    for gram, expected in zip(grams, expected_grams(net, x), strict=True):
        distance = 6 * float(gram_distance(gram.float(), expected))
        assert 0 < distance < 1e-2


def test_a_lowered_copy_leaves_the_original(net, x):
    original = snapshot_of(net)
    original.lowered("bf16")
    grams, _ = original.boundary_grams([NetworkCall("", (x,), {})])
    assert all(map(torch.equal, grams, expected_grams(net, x)))


def test_layer_modules_in_front_are_left_out(net, x):
    grams, _ = snapshot_of(net).boundary_grams([NetworkCall("", (x,), {})], first=2)
    assert [gram is None for gram in grams] == [True, True, False]


def test_no_more_samples_are_compared_than_asked_for(net, x):
    grams, batch_size = snapshot_of(net, samples=4).boundary_grams([NetworkCall("", (x,), {})])
    assert (batch_size, [tuple(gram.shape) for gram in grams]) == (6, [(4, 4)] * 3)


def test_batch_normalisation_may_use_the_batch(net, x):
    snapshot = snapshot_of(net)
    assert snapshot.batch_norms == {"1", "5"}
    running = copy.deepcopy(net[1].running_mean)
    calls = [NetworkCall("", (x,), {})]
    by_batch, _ = snapshot.boundary_grams(calls, by_batch={"1", "5"})
    again, _ = snapshot.boundary_grams(calls)
    training = copy.deepcopy(net)
    training[3].eval()  # dropout
    expected = gram_matrix(training[:4](x))
    torch.testing.assert_close(by_batch[0], expected)
    assert not torch.allclose(by_batch[0], again[0])
    assert all(map(torch.equal, again, expected_grams(net, x)))
    assert torch.equal(running, net[1].running_mean)


def test_inputs_and_random_state_stay_as_they_were(net, x):
    snapshot = snapshot_of(net).lowered("bf16")
    before, state = x.clone(), torch.get_rng_state()
    snapshot.boundary_grams([NetworkCall("", (x,), {})])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_earlier_output_is_its_own():
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 2)})
    chain = LayerChain.trace(net, lambda: net["c"](net["b"](net["a"](torch.rand(6, 4)))).sum(), ["a", "b"])
    snapshot = SnapshotNetwork({path: copy.deepcopy(net[path]) for path in "ab"}, chain, 64)
    x = torch.rand(6, 4)
    calls = [NetworkCall("a", (x,), {}), NetworkCall("b", (EarlierOutput(0, 0),), {})]
    grams, _ = snapshot.boundary_grams(calls)
    assert torch.equal(grams[1], gram_matrix(net["b"](net["a"](x))))


def test_padded_tokens_keep_an_axis_of_samples():
    net, tokens = Encoder(), ids(3, 6)
    chain = LayerChain.trace(net, lambda: net(tokens).sum())
    grams, batch_size = SnapshotNetwork({"": net}, chain, 64).boundary_grams([NetworkCall("", (tokens,), {})])
    assert batch_size == 3
    assert all(gram.shape == (3, 3) for gram in grams)


def test_a_network_without_linear_layers_cannot_run_in_int8():
    net = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4))
    chain = chain_of(deep_mlp())
    with pytest.raises(UnsupportedError):
        SnapshotNetwork({"": net}, chain, 64).lowered("int8")


def recorded(samples, first=0, batch=5):
    net = deep_mlp().eval()
    chain = LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum())
    recorder = GramRecorder(dict(net.named_modules()), chain, samples, first)
    x = torch.rand(batch, 4)
    recorder.start()
    net(x)
    recorder.stop()
    return recorder, [net[:end](x) for end in (4, 7, 9)]


def test_each_gram_matrix_is_of_its_activation():
    recorder, activations = recorded(samples=64)
    assert recorder.batch_size == 5
    for gram, activation in zip(recorder.grams, activations, strict=True):
        assert torch.equal(gram, gram_matrix(activation))


def test_no_more_samples_are_taken_than_asked_for():
    recorder, activations = recorded(samples=3)
    assert recorder.batch_size == 5
    assert [tuple(gram.shape) for gram in recorder.grams] == [(3, 3)] * 3
    assert torch.equal(recorder.grams[1], gram_matrix(activations[1][:3]))


def test_layer_modules_in_front_have_none():
    recorder, _ = recorded(samples=64, first=1)
    assert recorder.grams[0] is None
    assert all(gram is not None for gram in recorder.grams[1:])
