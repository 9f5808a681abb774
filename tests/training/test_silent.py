"""Callbacks and loggers that can be read, while nothing reaches them."""

import copy

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_egeria.training.silent import silent_callback, silent_logger


class Counting(L.Callback):
    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, *args):
        self.calls += 1

    def twice(self):
        return 2 * self.calls


def test_a_callback_is_read_and_its_hooks_do_nothing():
    real = Counting()
    stands = silent_callback(real)
    stands.on_train_batch_end()
    real.calls = 3
    assert isinstance(stands, Counting)
    assert (stands.calls, stands.twice()) == (3, 6)
    assert stands == real
    assert [real].index(stands) == 0
    assert {stands: 1}[stands] == 1


def test_what_is_set_on_it_does_not_reach_the_callback():
    real = Counting()
    stands = silent_callback(real)
    stands.calls += 1
    assert (stands.calls, real.calls) == (1, 0)
    assert copy.copy(stands).calls == 1


def test_a_checkpoint_callback_is_found_by_its_class(tmp_path):
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(tmp_path, monitor="loss")])
    trainer.callbacks = [silent_callback(one) for one in trainer.callbacks]
    assert trainer.checkpoint_callback.monitor == "loss"
    assert trainer.early_stopping_callback is None


def test_a_logger_knows_its_folder_and_logs_nothing(tmp_path):
    real = CSVLogger(tmp_path, name="runs", version=3)
    stands = silent_logger(real)
    stands.log_metrics({"loss": 1.0}, step=1)
    stands.experiment.log_metrics({"loss": 1.0}, step=1)
    stands.experiment["note"].append(1)
    stands.experiment["note"] = 1
    stands.save()
    assert stands.log_dir == real.log_dir
    assert stands.experiment.log_dir == real.experiment.log_dir
    assert real.experiment.metrics == []
