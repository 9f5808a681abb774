"""Metrics see what one process would have given them, once for each batch."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.metric_calls import MetricCalls, kept


class Metered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.one = MulticlassAccuracy(3)
        self.curve = MulticlassAUROC(3)
        self.many = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.extremes = MinMaxMetric(MulticlassAccuracy(3))
        self.sum, self.mean = SumMetric(), MeanMetric()

    def call(self, scores, labels):
        self.one(scores, target=labels)
        self.curve.update(scores, labels)
        self.many(scores, labels)
        self.extremes.update(scores, labels)
        self.sum.update((scores.argmax(1) == labels).sum())
        self.mean.update(scores)

    def values(self):
        named = ("one", "curve", "many", "extremes", "sum", "mean")
        return {name: getattr(self, name).compute() for name in named}


def batches(count=2):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.rand(6, 3, generator=generator).softmax(1), torch.randint(0, 3, (6,), generator=generator)


def test_parts_of_a_batch_count_as_the_batch():
    expected, module = Metered(), Metered()
    metrics = MetricCalls(module)
    for scores, labels in batches():
        expected.call(scores, labels)
        parts = []
        with metrics.taken(lambda call: parts[-1].append(kept(call))):  # noqa: B023 - called in this round
            for start in (0, 2, 4):
                parts.append([])
                module.call(scores[start : start + 2], labels[start : start + 2])
        metrics.repeat(parts)
        assert torch.equal(module.one._forward_cache, expected.one._forward_cache)  # which a Trainer logs
    assert module.values() == expected.values()
    assert not {"forward", "reset"} & vars(module.one).keys()


def test_a_value_is_that_of_the_micro_batch_and_leaves_no_trace():
    module = Metered()
    (scores, labels), *_ = batches()
    with MetricCalls(module).taken(lambda call: None):
        first, again = module.one(scores, labels), module.one(scores, labels)
    assert first == again == MulticlassAccuracy(3)(scores, labels)
    assert module.one.update_count == 0


def test_other_calls_in_a_micro_batch_are_repeated_one_by_one():
    module = Metered()
    (scores, labels), *_ = batches()
    metrics = MetricCalls(module)
    metrics.repeat([[("one", "update", (scores, labels), {})], []])
    assert module.one.update_count == 1
    assert metrics.path(module.one) == "one"
    assert metrics.path(MeanMetric()) is None


@pytest.mark.parametrize("name", ["compute", "reset"])
def test_what_needs_the_whole_batch_is_refused(name):
    module = Metered()
    with (
        MetricCalls(module).taken(lambda call: None),
        pytest.raises(UnsupportedError, match=rf"training_step calls {name}\(\) of the metric 'one'"),
    ):
        getattr(module.one, name)()
    module.one.reset()
