"""What suffixes take and save, measured in training."""

import pytest
import torch

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy, StructuredPartialBackprop
from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.observers import Observers
from lightning_egeria.methods.partial.measuring import SuffixMeasures
from lightning_egeria.methods.partial.plans import TemporalPlan
from lightning_egeria.methods.partial.steps import SuffixSteps
from lightning_egeria.methods.partial.weighting import RankTimes, WeightedPlan
from support.models import After, Classifier, fit
from support.networks import deep_mlp, step

INPUTS = (torch.linspace(-1, 1, 20).reshape(5, 4),)


def measured(net, plan, ranks=1, each=None):
    chain = LayerChain.trace(net, lambda: step(net, INPUTS))
    layers = [[net.get_parameter(name) for name in one.parameters] for one in chain.layer_modules]
    layers.append(list(net[9].parameters()))
    steps = SuffixSteps(net, chain, plan(len(chain)), [0] * len(chain), ranks=ranks)
    lines, own, device = [], Ranks(), torch.device("cpu")
    own.each = each or own.each
    return steps, SuffixMeasures(net, layers, steps, own, device, chain.max_depth, lines.append), lines


def train(net, observers, number):
    net.zero_grad()
    observers.batch_start(None, number)
    loss = step(net, INPUTS)
    observers.forward_end(loss)
    loss.backward()
    observers.backward_end()
    observers.batch_end()
    observers.optimizer_step(number + 1)


def test_shorter_suffixes_save_fewer_activations():
    net = deep_mlp()
    steps, measures, _ = measured(net, lambda _: TemporalPlan(1, 1 / 3))
    observers = Observers(steps, measures)
    for number in range(40):
        train(net, observers, number)
    saved = [measures.activation_bytes[depth] for depth in range(3)]
    assert saved[0] > saved[1] > saved[2] > 0
    shares = measures.times.shares()
    assert shares[0] == 1 >= shares[1] >= shares[2] > 0
    assert measures.counts.steps == 40
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_slow_ranks_are_balanced_every_ten_steps(monkeypatch):
    net = deep_mlp()
    rows = []

    def gather(values):
        rows.append(values)
        return [[1.0, 2.0, 1.0, 0.5], [2.0, 4.0, 2.0, 1.0]]

    steps, measures, lines = measured(net, lambda count: WeightedPlan(2, 0.25, count), ranks=2, each=gather)
    observers = Observers(steps, measures)
    for number in range(11):
        train(net, observers, number)
    assert len(rows) == 1
    assert len(rows[0]) == 4  # forward, and backward at three depths
    assert min(rows[0]) > 0
    assert steps.depths == (0, 2)
    assert lines == ["step 10: gradients of all but the first 0, 2 layer modules on rank 0, 1, ..."]
    assert RankTimes(2.0, (4.0, 2.0, 1.0)).seconds(2) == 3.0


def test_a_batch_without_backward_is_not_counted():
    net = deep_mlp()
    steps, measures, _ = measured(net, lambda _: TemporalPlan(1, 1 / 3))
    observers = Observers(steps, measures)
    for end in (observers.batch_end, observers.abort):
        observers.batch_start(None, 0)
        step(net, INPUTS)
        end()
        assert not net._forward_pre_hooks
    observers.optimizer_step(1)
    assert measures.activation_bytes == {}
    assert measures.counts.steps == 0


@pytest.mark.parametrize("first", ["freezing", "partial"])
def test_a_frozen_front_is_no_part_of_a_suffix(first):
    freezing = KnowledgeGuidedFreezing(ScriptedPolicy({5: 1}), evaluate_every_n_steps=1, background=False)
    partial = StructuredPartialBackprop(min_share=0.5)
    seen = {}
    look = After(lambda trainer, _: seen.setdefault(trainer.global_step, partial.paused_modules))
    callbacks = [freezing, partial] if first == "freezing" else [partial, freezing]
    fit(Classifier(), *callbacks, look)
    # Two suffixes in turn: of 3 layer modules before, of the last 2 after.
    assert [seen[number] for number in range(3, 6)] == [0, 1, 0]
    assert [seen[number] for number in range(6, 10)] == [2, 1, 2, 1]
    counts = list(partial.contributions.values())
    assert counts[0] < 5 < counts[1] < counts[2]
    assert partial.savings().steps == counts[2]
