"""Steps that nothing else sees: hidden training, dry runs, and callbacks and loggers that stand in for others."""

import contextlib
import copy
import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_egeria.core.training.branches import train_hidden
from lightning_egeria.core.training.feed import BranchFeed, Feed
from lightning_egeria.core.training.fit_state import FitState
from lightning_egeria.core.training.isolation import dry_run, muted_callback, muted_logger, saving_later
from support.models import After, Classifier, equal, fit, images, loader


class Twice(L.Callback):
    """Trains three batches, unseen, before the third one of the run, and returns to where it was, or not."""

    def __init__(self, returns):
        self.returns, self.losses = returns, []

    def on_train_epoch_start(self, trainer, pl_module):
        feed = Feed.install(trainer, self, lambda: self.train(trainer, feed))

    def on_train_epoch_end(self, trainer, pl_module):
        Feed.remove(trainer, self)
        assert not isinstance(trainer.fit_loop._data_fetcher, Feed)

    def train(self, trainer, feed):
        if trainer.global_step != 2 or self.losses:
            return
        state = FitState(trainer)
        self.losses = train_hidden(trainer, None, BranchFeed(feed.ahead.from_here(0), lambda: None), 3)
        if self.returns:
            state.restore()


class Logged(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        self.logger.log_metrics({"direct": float(loss.detach())}, step=self.global_step)
        assert self.logger.name == "lines"
        return loss


class Lines(L.pytorch.loggers.logger.Logger):
    """Keeps what it is given."""

    name, version = "lines", 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines += [(step, name, value) for name, value in metrics.items()]

    def log_hyperparams(self, *args, **kwargs):
        """Of no interest here."""


def test_what_comes_back_was_not_there():
    found = []
    for callbacks in ((), (Twice(True),)):
        module, lines = Logged(), Lines()
        fit(module, *callbacks, data=loader(images(64)), logger=lines, log_every_n_steps=1)
        found.append((module, lines.lines, callbacks))
    (plain, expected, _), (module, lines, (twice,)) = found
    assert lines == expected
    assert module.losses == plain.losses
    assert twice.losses == plain.losses[2:5]
    assert equal(plain, module)


def test_what_stays_was_trained():
    plain, module = Classifier(), Classifier()
    fit(plain, data=loader(images(64)))
    fit(module, Twice(False), data=loader(images(64)))
    assert not equal(plain, module)
    assert len(module.losses) == len(plain.losses)


def test_checkpoints_wait(tmp_path):
    trainer = L.Trainer(accelerator="cpu", logger=False)
    with saving_later(trainer) as waiting:
        trainer.save_checkpoint(tmp_path / "saved", weights_only=True)
    assert waiting == [(str(tmp_path / "saved"), True)]
    assert not (tmp_path / "saved").exists()
    assert "save_checkpoint" not in vars(trainer)


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
def test_a_run_with_dry_runs_is_the_run_without(training):
    def rehearse(trainer, module):
        batch = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])
        with dry_run(module), torch.no_grad():
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
    with contextlib.suppress(KeyError), dry_run(module):
        module.log("a", 1.0)  # without a Trainer, it does nothing anyway
        raise KeyError
    assert not {"log", "log_dict"} & vars(module).keys()


class Counting(L.Callback):
    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, *args):
        self.calls += 1

    def twice(self):
        return 2 * self.calls


def test_a_callback_is_read_and_its_hooks_do_nothing():
    real = Counting()
    stands = muted_callback(real)
    stands.on_train_batch_end()
    real.calls = 3
    assert isinstance(stands, Counting)
    assert (stands.calls, stands.twice()) == (3, 6)
    assert stands == real
    assert [real].index(stands) == 0
    assert {stands: 1}[stands] == 1


def test_what_is_set_on_it_does_not_reach_the_callback():
    real = Counting()
    stands = muted_callback(real)
    stands.calls += 1
    assert (stands.calls, real.calls) == (1, 0)
    assert copy.copy(stands).calls == 1


def test_a_checkpoint_callback_is_found_by_its_class(tmp_path):
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(tmp_path, monitor="loss")])
    trainer.callbacks = [muted_callback(one) for one in trainer.callbacks]
    assert trainer.checkpoint_callback.monitor == "loss"
    assert trainer.early_stopping_callback is None


def test_a_logger_knows_its_folder_and_logs_nothing(tmp_path):
    real = CSVLogger(tmp_path, name="runs", version=3)
    stands = muted_logger(real)
    stands.log_metrics({"loss": 1.0}, step=1)
    stands.experiment.log_metrics({"loss": 1.0}, step=1)
    stands.experiment["note"].append(1)
    stands.experiment["note"] = 1
    stands.save()
    assert stands.log_dir == real.log_dir
    assert stands.experiment.log_dir == real.experiment.log_dir
    assert real.experiment.metrics == []
