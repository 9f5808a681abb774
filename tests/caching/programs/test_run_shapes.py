"""Shapes of a run: accumulation, several optimizers, interruptions, second fits, resumed runs, the Tuner."""

from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional as F

from lightning_egeria.caching import policy, stats
from lightning_egeria.core.profiling.race import TURN, TURNS
from support.caching.parts import (
    WORKERS,
    Classifier,
    ConvNet,
    Net,
    Validated,
    data_of,
    grid,
    images,
    loader,
    on,
    vectors,
)

# Options of the Trainer.
OPTIONS = {
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "accumulate over the epoch's end": {"accumulate_grad_batches": 3},
    "gradient_clip_val": {"gradient_clip_val": 0.1},
    "gradient_clip by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "limit_train_batches": {"limit_train_batches": 3},
    "limit_train_batches share": {"limit_train_batches": 0.5},
    "limit_train_batches beyond": {"limit_train_batches": 9},
    "limit_val_batches": {"limit_val_batches": 2},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval share": {"val_check_interval": 0.5},
    "val_check_interval over epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2},
    "max_steps": {"max_steps": 10, "max_epochs": -1},
    "max_steps in mid-epoch": {"max_steps": 7},
    "max_time": {"max_epochs": 3, "max_time": "00:01:00:00"},
    "min_epochs": {"min_epochs": 3, "max_epochs": 5},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "deterministic": {"deterministic": True},
    "inference_mode": {"inference_mode": False},
    "log_every_n_steps": {"log_every_n_steps": 3},
    "profiler": {"profiler": "simple"},
    "barebones": {"barebones": True, "logger": None, "log_every_n_steps": None, "num_sanity_val_steps": None},
    "enable_progress_bar": {"enable_progress_bar": True},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16 and accumulation": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("options", grid(OPTIONS, every=4))
@WORKERS
def test_option_of_the_trainer(compare, options, workers):
    schedule = {1: 2} if "accumulate_grad_batches" in options else None
    barebones = (
        {"enable_progress_bar", "enable_model_summary", "enable_checkpointing"} if "barebones" in options else ()
    )

    def program(run):
        more = dict.fromkeys(barebones, None)
        data = loader(num_workers=workers)
        module = _Quiet() if barebones else Validated()
        run.fit(module, data, val=loader(shuffle=False), schedule=schedule, **{"max_epochs": 4} | options | more)

    compare(program, served=None if workers else True)  # workers are ahead by an epoch of this length


class _Quiet(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss_of(*batch)

    def validation_step(self, batch, batch_idx):
        pass


def test_one_batch_is_overfitted(compare):
    compare(lambda run: run.fit(Classifier(), loader(shuffle=False), overfit_batches=2, max_epochs=6), served=None)


def test_fast_dev_run(compare):
    compare(lambda run: run.fit(Validated(), val=loader(), fast_dev_run=2), served=None, freezes=False)


# Kinds of optimization.
class Skips(Classifier):
    """Some batches are skipped."""

    def __init__(self, period, after=False):
        super().__init__()
        self.period, self.after = period, after

    def training_step(self, batch, batch_idx):
        skipped = batch_idx % self.period == self.period - 1
        if skipped and not self.after:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if skipped else loss


@pytest.mark.parametrize(("period", "after"), grid([2, 3, 4], [False, True], every=4))
def test_batches_are_skipped(compare, period, after):
    compare(lambda run: run.fit(Skips(period, after), max_epochs=4))


def test_batches_are_skipped_by_a_hook(compare):
    """``on_train_batch_start`` returns -1: the rest of the epoch is skipped."""

    class Ends(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 and self.current_epoch == 1 else None

    compare(lambda run: run.fit(Ends(), max_epochs=4))


class TwoOptimizers(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        head = torch.optim.Adam(self.net.head.parameters(), lr=0.01)
        body = [p for name, p in self.net.named_parameters() if "head" not in name]
        return [torch.optim.SGD(body, lr=0.05), head], [torch.optim.lr_scheduler.StepLR(head, 3)]

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(*batch)
        body, head = self.optimizers()
        self.manual_backward(loss)
        body.step()
        body.zero_grad()
        if batch_idx % 2:
            head.step()
            head.zero_grad()
            self.lr_schedulers().step()
        return loss.detach()


def test_two_optimizers(compare):
    compare(lambda run: run.fit(TwoOptimizers(), schedule={3: 2}))


class Adversary(Classifier):
    """Two networks in turn, as in a GAN: the first reads the batch, the second what the first makes of it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.generator = False, nn.Linear(8, 8)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.SGD(self.generator.parameters(), lr=0.05)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        loss = F.cross_entropy(self.net(x), y)
        if self.global_step:
            loss = loss + self.net(self.generator(x).detach()).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if self.global_step < 2:  # the first batch shows the layer chain
            return loss.detach()
        self.toggle_optimizer(second)
        fooled = -self.net(self.generator(x)).mean()
        second.zero_grad()
        self.manual_backward(fooled)
        second.step()
        self.untoggle_optimizer(second)
        return loss.detach()


def test_networks_in_turn(compare):
    compare(lambda run: run.fit(Adversary(), schedule={3: 2}), served=None)


def test_manual_accumulation(compare):
    class Accumulates(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(*batch)
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss.detach()

    compare(lambda run: run.fit(Accumulates(), schedule={1: 2}))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers(compare, optimizer):
    class Other(Classifier):
        def configure_optimizers(self):
            optimizer_ = optimizer(self.parameters(), lr=0.01, weight_decay=0.1)
            return [optimizer_], [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer_, 0.9), "interval": "step"}
            ]

    compare(lambda run: run.fit(Other()))


# Other uses of the Trainer and the data module.
class Full(Validated):
    def test_step(self, batch, batch_idx):
        self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


def test_validate_test_and_predict_afterwards(compare):
    def program(run):
        hooks = {
            name: lambda: loader(shuffle=False) for name in ("val_dataloader", "test_dataloader", "predict_dataloader")
        }
        wrapped = run.data(data_of(train_dataloader=loader, **hooks))
        trainer, module = run.trainer(), Full()
        run.note(trainer.validate(module, datamodule=wrapped, verbose=False))
        trainer.fit(module, datamodule=wrapped)
        run.ended(trainer, module)
        run.note(trainer.validate(module, datamodule=wrapped, verbose=False))
        run.note(trainer.test(module, datamodule=wrapped, verbose=False))
        run.note(trainer.predict(module, datamodule=wrapped))

    compare(program)


class Sized(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)

    def val_dataloader(self):
        return loader(shuffle=False)


def test_learning_rate_finder(compare):
    class Tuned(Validated):
        def __init__(self):
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def program(run):
        wrapped, trainer, module = run.data(Sized()), run.trainer(default_root_dir=run.folder), Tuned()
        found = Tuner(trainer).lr_find(module, datamodule=wrapped, num_training=8, attr_name="lr")
        run.note((found.results, module.lr))
        trainer.fit(module, datamodule=wrapped)
        run.ended(trainer, module)

    compare(program)


@pytest.mark.parametrize("tuner", grid(["Tuner", "callback"], every=4))
def test_batch_size_finder(compare, tuner):
    def program(run):
        options = {"mode": "power", "steps_per_trial": 1, "init_val": 2, "max_trials": 2}
        finder = [BatchSizeFinder(**options)] if tuner == "callback" else []
        wrapped = run.data(Sized())
        trainer, module = run.trainer(*finder, default_root_dir=run.folder), Validated()
        if tuner == "Tuner":
            Tuner(trainer).scale_batch_size(module, datamodule=wrapped, **options)
        run.note(wrapped.batch_size)
        trainer.fit(module, datamodule=wrapped)
        run.ended(trainer, module)

    compare(program, served=None)


def test_batch_size_changes_during_the_run(compare):
    def program(run):
        data = Sized()

        def grow(trainer, module):
            trainer.datamodule.batch_size = 8

        run.fit(Validated(), data, on(on_train_epoch_end=grow), reload_dataloaders_every_n_epochs=1, max_epochs=4)

    compare(program)


def test_data_module_is_the_users_own(compare):
    """Hyperparameters, attributes, methods and the state of a data module, read and written from outside."""

    class Own(Sized):
        def setup(self, stage):
            self.stages = [*getattr(self, "stages", []), stage]

        def state_dict(self):
            return {"size": self.batch_size}

        def load_state_dict(self, state):
            self.loaded = state

        def helper(self, number):
            return number + self.batch_size

    def program(run):
        wrapped = run.data(Own(batch_size=6))
        trainer, module = run.trainer(), Validated()
        run.note((dict(wrapped.hparams), dict(wrapped.hparams_initial), wrapped.batch_size, wrapped.helper(3)))
        wrapped.extra = 5
        trainer.fit(module, datamodule=wrapped)
        run.ended(trainer, module)
        run.note((wrapped.stages, wrapped.extra, wrapped.batch_size, trainer.datamodule.helper(1)))
        path = run.folder / "end.ckpt"
        trainer.save_checkpoint(path)
        trainer.fit(module, datamodule=wrapped, ckpt_path=path)
        run.note(wrapped.loaded)

    compare(program, served=None)  # the second fit has nothing left to train


@pytest.mark.parametrize("net", [Net, ConvNet])
def test_step_takes_an_optimizer_closure_twice(compare, net):
    """An optimizer that evaluates its closure again: two forwards and two backwards per batch."""

    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    class Uses(Classifier):
        def configure_optimizers(self):
            return Twice(self.parameters(), lr=0.05)

    compare(lambda run: run.fit(Uses(net()), loader(images()) if net is ConvNet else None), served=None)


@WORKERS
def test_turns_without_the_cache_change_nothing(compare, monkeypatch, workers):
    """Whole steps with and without it are compared in between, whatever the clock says about them."""
    always = stats.Accounts.judgement
    text = []

    def judgement(accounts, device, batches):
        found = always(accounts, device, None)
        text.append(found[1]) if found is not None else None
        return None if found is None else (True, found[1])

    monkeypatch.setattr(stats.Accounts, "judgement", judgement)
    monkeypatch.setattr("lightning_egeria.core.profiling.race.CLEAR", 2)  # so no turn is clear, and there are two

    def program(run):
        training, validation = loader(vectors(60), num_workers=workers), loader(vectors(12), shuffle=False)
        data = data_of(train_dataloader=lambda: training, val_dataloader=lambda: validation)
        # Not for longer: the harness sets it, too.
        with mock.patch.multiple(policy, COMPARED_BATCHES=3, CLEAR=float("inf")):
            run.fit(Validated(), data, max_epochs=8)

    cached = compare(program).caches[0]
    assert any("without" in one for one in text)
    assert cached.stats.misses >= 60 + TURNS * TURN * 6  # each batch without it has six
