"""Fits that end in the middle, that come again, and that resume."""

import contextlib

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch.nn import functional as F

from support.caching.parts import (
    Classifier,
    Stepping,
    Validated,
    at,
    data_of,
    grid,
    loader,
    on,
    vectors,
)


class StopError(Exception):
    """Raised by a program."""


def _raises(error):
    def fail(*_):
        raise error

    return fail


PLACES = ["in the step", "batch start", "batch end", "backward", "validation", "epoch end"]


def _failing(run, place, error, batch):
    """A module, a data loader and callbacks that raise ``error`` in ``batch``."""
    fail = _raises(error)

    def now(*_):
        if run.batches == batch and not getattr(run, "failed", False):
            run.failed = True
            fail()

    def step(module, x, y):
        loss = F.cross_entropy(module.net(x), y)
        if place == "in the step":
            now()
        return loss

    class Fails(Stepping):
        def validation_step(self, batch, batch_idx):
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    hooks = {"batch start": "on_train_batch_start", "batch end": "on_train_batch_end", "backward": "on_before_backward"}
    hooks |= {"validation": "on_validation_batch_end", "epoch end": "on_train_epoch_end"}
    callbacks = [on(**{hooks[place]: now})] if place in hooks else []
    module = Fails(step)
    return module, loader(), callbacks


AFTER = ["another Trainer", "new module", "no"]


@pytest.mark.parametrize(("place", "again", "error"), grid(PLACES, AFTER, [StopError, KeyboardInterrupt], every=11))
def test_training_ends_in_the_middle(compare, place, again, error):
    batch = 12 if place in ("validation", "epoch end") else 10

    def program(run):
        module, data, callbacks = _failing(run, place, error(), batch)
        val = loader(shuffle=False)
        with contextlib.suppress(StopError, SystemExit, KeyboardInterrupt):
            run.fit(module, data, *callbacks, val=val)
        if again == "no":
            return
        if again == "new module":
            module = Validated()
        run.fit(module, data, val=val)

    # An interrupted sampler of PyTorch has drawn its order already, with or without a cache.
    compare(program)


def test_same_trainer_after_an_error(compare):
    def program(run):
        module, data, callbacks = _failing(run, "in the step", StopError(), 10)
        trainer = run.trainer(*callbacks, schedule={2: 2, 12: 2})
        wrapped = run.data(data, loader(shuffle=False))
        with contextlib.suppress(StopError):
            trainer.fit(module, datamodule=wrapped)
        trainer.fit_loop.max_epochs = 6
        trainer.fit(module, datamodule=wrapped)
        run.ended(trainer, module)

    compare(program)


# Second fits.
AGAIN = {
    "same data": lambda run, wrapped: wrapped,
    "new cache, same data": lambda run, wrapped: run.data(wrapped.datamodule if run.cached else wrapped),
    "other data": lambda run, wrapped: run.data(loader(vectors(seed=2))),
    "other labels": lambda run, wrapped: run.data(loader(_other_labels())),
    "other batch size": lambda run, wrapped: run.data(loader(batch_size=4)),
}


def _other_labels():
    x, y = vectors().tensors
    return torch.utils.data.TensorDataset(x, (y + 1) % 3)


@pytest.mark.parametrize(
    ("data", "module", "trainer"),
    grid(AGAIN, ["same module", "same start"], ["same Trainer", "another Trainer"], every=3),
)
def test_second_fit(compare, data, module, trainer):
    def program(run):
        first = Validated()
        start = {name: value.clone() for name, value in first.state_dict().items()}
        wrapped, trainers = run.data(loader(), loader(shuffle=False)), [run.trainer(schedule={2: 2, 14: 2})]
        trainers[0].fit(first, datamodule=wrapped)
        run.ended(trainers[0], first)
        second = first
        if module == "same start":  # the same weights at the freeze: entries of the first fit stand for the second
            second = Validated()
            second.load_state_dict(start)
            torch.manual_seed(0)
        if trainer == "another Trainer":
            trainers.append(run.trainer())
        else:
            trainers[0].fit_loop.max_epochs = 6
        trainers[-1].fit(second, datamodule=data(run, wrapped))
        run.ended(trainers[-1], second)

    compare(program)


def test_cache_of_a_second_run_is_found(compare):
    """A run again, from the same weights: it finds what the first one wrote."""

    def program(run):
        for _ in range(2):
            L.seed_everything(0, verbose=False)
            run.fit(Classifier(), max_epochs=2)

    run = compare(program)
    assert run.caches[1].stats.hits >= run.caches[0].stats.hits > 0
    assert run.caches[1].stats.to_write < run.caches[0].stats.to_write


# Resumed runs.
@pytest.mark.parametrize(("step", "kind"), grid([3, 6, 8, 9], ["loader", "data module"], every=7))
def test_resumed_run(compare, step, kind):
    def program(run):
        def data():
            return loader() if kind == "loader" else data_of(train_dataloader=loader)

        path = run.folder / "mid.ckpt"
        run.fit(Validated(), data(), at(step, lambda trainer, _: trainer.save_checkpoint(path)))
        run.fit(Validated(), data(), ckpt_path=path, max_epochs=4)

    compare(program)


def test_checkpoints_are_the_same(compare):
    def program(run):
        run.fit(
            Validated(),
            data_of(train_dataloader=loader, val_dataloader=lambda: loader(shuffle=False)),
            ModelCheckpoint(run.folder / "checkpoints", monitor="val", save_top_k=2, save_last=True),
            enable_checkpointing=True,
            max_epochs=4,
        )
        for path in sorted((run.folder / "checkpoints").glob("*.ckpt")):
            run.note((path.name, torch.load(path, weights_only=False)["state_dict"]))

    compare(program)


def test_early_stopping_and_a_timer(compare):
    def program(run):
        run.fit(
            Validated(),
            None,
            EarlyStopping("val", patience=1),
            Timer(interval="epoch"),
            val=loader(shuffle=False),
            max_epochs=8,
        )

    compare(program)
