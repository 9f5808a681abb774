"""The loss of each sample, without a trace."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.nn import functional as F

from lightning_egeria.core.batches.rows import Rows
from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.errors import PerSampleLossError
from lightning_egeria.methods.selecting.scoring import Scorer
from support.models import Classifier, images

BATCH = images(6).tensors


def scorer_of(module, per_sample_loss=None):
    return Scorer(SimpleNamespace(lightning_module=module, precision_plugin=Precision()), per_sample_loss)


def test_losses_are_those_of_evaluation_and_nothing_moves():
    module = Classifier()
    module.net.deep[1].eval()
    state, modes = copy.deepcopy(module.state_dict()), [part.training for part in module.modules()]
    random = RandomState.current()
    losses = scorer_of(module).losses(BATCH, 6, 0)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert module.losses == []
    assert RandomState.current() == random
    assert all(parameter.grad is None for parameter in module.parameters())
    module.eval()
    with torch.no_grad():
        assert np.array_equal(losses, F.cross_entropy(module.net(BATCH[0]), BATCH[1], reduction="none").double())


def test_own_function_takes_module_and_batch():
    module = Classifier()
    seen = []

    def loss(given, batch):
        seen.append((given is module, given.training, torch.is_grad_enabled()))
        return batch[1].float()

    assert scorer_of(module, loss).losses(BATCH, 6, 0).tolist() == BATCH[1].tolist()
    assert seen == [(True, False, False)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda module, batch: torch.zeros(5), r"shape \(6,\), one loss for each sample, got the shape \(5,\)"),
        (lambda module, batch: torch.zeros(()), r"got the shape \(\)"),
        (lambda module, batch: [0.0] * 6, "got list"),
    ],
)
def test_wrong_shape_is_named(wrong, words):
    with pytest.raises(PerSampleLossError, match=words):
        scorer_of(Classifier(), wrong).losses(BATCH, 6, 0)


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 0.1]))


def test_losses_that_cannot_be_read_ask_for_a_function():
    with pytest.raises(PerSampleLossError, match=r"the training step returned .* per_sample_loss=function\)"):
        scorer_of(Weighted()).check(lambda: BATCH, 6, 0, Rows.of)


def brightest_first(batch):
    order = batch[0].mean((1, 2, 3)).argsort()
    return batch[0][order], batch[1][order]


class Sorting(Classifier):
    def training_step(self, batch):
        return super().training_step(brightest_first(batch), 0)


class NeedsOrder(Classifier):
    def training_step(self, batch):
        assert torch.equal(batch[0], BATCH[0])
        return super().training_step(batch, 0)


class Noisy(Classifier):
    def training_step(self, batch):
        return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]), 0)


def test_losses_in_another_order_are_refused():
    with pytest.raises(PerSampleLossError, match="in another order than the samples"):
        scorer_of(Sorting()).check(lambda: BATCH, 6, 0, Rows.of)

    def function(module, batch):
        return F.cross_entropy(module.net(batch[0]), batch[1], reduction="none")

    with pytest.raises(PerSampleLossError, match="in another order than the samples"):
        scorer_of(Classifier(), lambda *both: function(both[0], brightest_first(both[1]))).check(
            lambda: BATCH, 6, 0, Rows.of
        )
    for module in (Classifier(), NeedsOrder(), Noisy(), InPlace()):
        scorer_of(module).check(lambda: tuple(tensor.clone() for tensor in BATCH), 6, 0, Rows.of)


class InPlace(Classifier):
    def training_step(self, batch):
        return super().training_step((batch[0].mul_(2), batch[1]), 0)


def test_batch_that_the_step_changes_stays_as_it_was():
    batch = tuple(tensor.clone() for tensor in BATCH)
    scorer = scorer_of(InPlace())
    scorer.check(lambda: batch, 6, 0, Rows.of)
    losses = scorer.losses(batch, 6, 0)
    assert torch.equal(batch[0], BATCH[0])
    assert np.array_equal(scorer_of(Classifier()).losses((BATCH[0] * 2, BATCH[1]), 6, 0), losses)


def test_linear_and_metrics_keep_their_state():
    class Counting(Classifier):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
            self.register_buffer("steps", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            self.steps += 1
            self.log("train/loss", 1.0)
            return super().training_step(batch, batch_idx)

    module = Counting()
    scorer_of(module).losses(BATCH, 6, 0)
    assert module.steps == 0


class Contrastive(Classifier):
    def training_step(self, batch):
        one, other = (F.normalize(self.net(batch[0] + shift), dim=1) for shift in (0, 0.1))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


class Summed(Classifier):
    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / len(batch[1])


def test_a_loss_that_depends_on_the_others_is_told(recwarn):
    with pytest.warns(UserWarning, match="the loss of a sample depends on the other samples of its batch"):
        scorer_of(Contrastive()).check(lambda: BATCH, 6, 0, Rows.of)
    recwarn.clear()
    for module in (Classifier(), Noisy(), Summed()):
        scorer_of(module).check(lambda: BATCH, 6, 0, Rows.of)
    assert not recwarn
