"""Batches that only a recorder sees."""

import lightning as L
from models import Classifier, equal, fit, images, loader

from lightning_egeria.training.feed import BranchFeed, Feed
from lightning_egeria.training.fit_state import FitState
from lightning_egeria.training.unseen import BranchRecorder, advance, saving_later, unseen


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
        state, recorder = FitState(trainer), BranchRecorder(None)
        batches = BranchFeed(feed.ahead.from_here(0), lambda: None)
        with unseen(trainer, recorder):
            for _ in range(3):
                advance(trainer, batches)
        self.losses = recorder.take()
        assert recorder.take() == []
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
