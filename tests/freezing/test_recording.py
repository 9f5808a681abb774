"""Gram matrices are taken of the boundary activations as they pass."""

import torch
from networks import deep_mlp

from lightning_egeria.freezing.recording import GramRecorder
from lightning_egeria.freezing.similarity import gram_matrix
from lightning_egeria.network.chain import LayerChain


def recorded(samples, first=0, batch=5):
    net = deep_mlp().eval()
    chain = LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum())
    recorder = GramRecorder(dict(net.named_modules()), chain, samples, first)
    x = torch.rand(batch, 4)
    recorder.start()
    net(x)
    recorder.stop()
    return recorder, [net[:end](x) for end in (4, 7, 9)]


def test_each_is_that_of_its_activation():
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
