"""A rehearsed step leaves no trace."""

import contextlib
import random

import lightning as L
import numpy as np
import pytest
import torch
from models import After, Classifier, fit
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_egeria.training.rehearsal import rehearsal


class Noted(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.net(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        self.accuracy.update(scores, labels)
        self.losses.append(loss.item())
        self.log_dict({"train/loss": loss, "train/noise": random.random() + np.random.rand()}, on_epoch=True)
        self.log("train/accuracy", self.accuracy, on_epoch=True)
        return loss


@pytest.mark.parametrize("training", [True, False])
def test_a_run_with_rehearsals_is_the_run_without(training):
    def rehearse(trainer, module):
        batch = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])
        with rehearsal(module), torch.no_grad():
            module.train(training)
            module.training_step(batch, 0)

    runs = []
    for callbacks in ((), (After(rehearse),)):
        module = Noted()
        trainer = fit(module, *callbacks)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert {"train/loss_epoch", "train/accuracy"} <= metrics.keys()
        runs.append((module.state_dict(), metrics, module.losses))
    (first, metrics, losses), (second, other_metrics, other_losses) = runs
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert metrics == other_metrics
    assert losses == other_losses


def test_logging_works_again_after_an_error():
    module = L.LightningModule()
    with contextlib.suppress(KeyError), rehearsal(module):
        module.log("a", 1.0)  # without a Trainer, it does nothing anyway
        raise KeyError
    assert not {"log", "log_dict"} & vars(module).keys()
