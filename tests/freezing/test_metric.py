"""The SP loss as a metric: the mean over batches, and what torchmetrics asks of every metric."""

import pickle

import numpy as np
import pytest
import torch

from lightning_egeria import SimilarityPreservingLoss
from lightning_egeria.freezing.similarity import similarity_preserving_loss


def loss(activation, reference):
    return float(similarity_preserving_loss(activation, reference))


BATCHES = (2, 5, 5, 9)


def pairs():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(b, 6, generator=generator), torch.randn(b, 4, generator=generator)) for b in BATCHES]


def filled():
    metric = SimilarityPreservingLoss()
    for pair in pairs():
        metric.update(*pair)
    return metric


def test_is_the_mean_over_the_batches():
    expected = np.mean([loss(*pair) for pair in pairs()])
    assert float(filled().compute()) == pytest.approx(expected, rel=1e-4)


def test_forward_returns_the_value_of_the_batch():
    metric = SimilarityPreservingLoss()
    for pair in pairs():
        assert float(metric(*pair)) == pytest.approx(loss(*pair), rel=1e-4)
    assert torch.equal(metric.compute(), filled().compute())


def test_reset_forgets():
    metric = filled()
    metric.reset()
    first = pairs()[0]
    metric.update(*first)
    assert float(metric.compute()) == pytest.approx(loss(*first), rel=1e-4)


def test_nan_before_the_first_batch():
    metric = SimilarityPreservingLoss()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert torch.isnan(metric.compute())


def test_pickles():
    copy = pickle.loads(pickle.dumps(filled()))
    assert torch.equal(copy.compute(), filled().compute())


def test_state_dict_round_trip():
    metric = filled()
    metric.persistent(True)
    copy = SimilarityPreservingLoss()
    copy.persistent(True)
    copy.load_state_dict(metric.state_dict())
    pair = pairs()[0]
    metric.update(*pair)
    copy.update(*pair)
    assert torch.equal(copy.compute(), metric.compute())


def test_merges_with_the_metric_of_another_process():
    several = pairs()
    metric, other = SimilarityPreservingLoss(), SimilarityPreservingLoss()
    for pair in several[:3]:
        metric.update(*pair)
    other.update(*several[3])
    metric.merge_state(other)
    assert float(metric.compute()) == pytest.approx(float(filled().compute()), rel=1e-6)


def test_under_autocast_and_in_half_precision():
    metric = SimilarityPreservingLoss()
    halved = [(first.bfloat16(), second) for first, second in pairs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for pair in halved:
            metric.update(*pair)
    assert metric.compute().dtype is torch.float32
    assert float(metric.compute()) == pytest.approx(np.mean([loss(*pair) for pair in halved]), rel=1e-4)


def test_holds_no_graph():
    metric = SimilarityPreservingLoss()
    metric.update(torch.randn(3, 4, requires_grad=True) * 2, torch.randn(3, 4))
    assert not metric.compute().requires_grad


def test_different_batches_are_refused():
    with pytest.raises(ValueError, match="same samples"):
        SimilarityPreservingLoss().update(torch.ones(4, 2), torch.ones(5, 2))
