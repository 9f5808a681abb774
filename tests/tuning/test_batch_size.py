"""The batch size in a fit: the same samples in the same order, cut otherwise, from the winner of a search on."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from lightning_egeria import BranchTuner, Choice, LogUniform, Uniform
from lightning_egeria.core.batches.batch_sampler import MutableBatchSampler
from lightning_egeria.core.training.loops import set_epoch_length
from lightning_egeria.errors import TrainingDataError, UnsupportedError
from support import tuning as tally
from support.models import Classifier, ConvNet, equal, fit, images
from support.tuning import Planned

RATE = 0.005


def tuner(*tried, **arguments):
    """Settings of rate and batch size, after the present one. Whoever has no rate to speak of does not win."""
    spaces = {"lr": LogUniform(1e-12, 10), "batch_size": Choice([4, 8, 16, 32])}
    planned = Planned(*({"lr": rate, "batch_size": size} for rate, size in tried))
    return BranchTuner(spaces, searcher=planned, **{"first_steps": 4, "max_share": 100, "at_epochs": (1,), **arguments})


class Slow(Classifier):
    """Learns nothing until its rate changes."""

    def __init__(self, dropout=0.2):
        torch.manual_seed(0)
        super().__init__(ConvNet(dropout=dropout), lr=1e-12)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[1].tolist())
        return super().training_step(batch, batch_idx)


def samples(count=128):
    """Images as bright as their label."""
    noise, labels = images(count).tensors
    return TensorDataset(noise / 4 + labels.view(-1, 1, 1, 1), labels)


def data(count=128, seed=None, given=False, **options):
    if seed is not None:
        options["generator"] = torch.Generator().manual_seed(seed)
    if given:
        return DataLoader(samples(count), batch_sampler=BatchSampler(RandomSampler(range(count)), 8, False))
    return DataLoader(samples(count), **{"batch_size": 8, **options})


class ByHand(L.Callback):
    """Changes rate and batch size where epoch 1 begins."""

    def __init__(self, sampler, size):
        self.sampler, self.size = sampler, size

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = RATE
            self.sampler.change(self.size)
        set_epoch_length(trainer, self.sampler.full_length)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (16, {"shuffle": True}),
        (16, {"shuffle": True, "seed": 7}),
        (4, {"shuffle": True, "drop_last": True}),
        (16, {"given": True}),
        pytest.param(16, {"shuffle": True, "num_workers": 2, "persistent_workers": True}, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_a_run_with_that_size(size, options):
    """Bit for bit: dropout, order, the samples of each batch, and the number of steps."""
    plain, tuned = Slow(), Slow()
    sampler = MutableBatchSampler.like(data(**options).batch_sampler)
    workers = {name: value for name, value in options.items() if "workers" in name}
    if "seed" in options:
        workers["generator"] = sampler.sampler.generator
    by_hand = fit(plain, ByHand(sampler, size), data=DataLoader(samples(), batch_sampler=sampler, **workers))
    callback = tuner((1e-12, 32), (RATE, size))
    trainer = fit(tuned, callback, data=data(**options))
    assert callback.setting == {"lr": RATE, "batch_size": size}
    assert tuned.seen == plain.seen
    assert tuned.losses == plain.losses
    assert trainer.global_step == by_hand.global_step
    assert equal(plain, tuned)


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "drop_last": True}])
def test_one_size_trains_bit_for_bit_as_without(options):
    plain, tuned = Slow(), Slow()
    first = fit(plain, data=data(60, **options))
    second = fit(tuned, tuner(at_epochs=(0, 2)), data=data(60, **options))
    assert (tuned.seen, tuned.losses) == (plain.seen, plain.losses)
    assert first.global_step == second.global_step
    assert equal(plain, tuned)
    assert type(second.fit_loop._data_source).__name__ == "_DataLoaderSource"


def test_a_size_without_memory_and_one_too_large_fail():
    class Small(Slow):
        def training_step(self, batch, batch_idx):
            if len(batch[1]) == 16:
                raise MemoryError("Unable to allocate 2 GiB")
            return super().training_step(batch, batch_idx)

    plain, module, callback = Slow(), Small(), tuner((RATE, 16), (RATE, 1000))
    callback.tunables.batch_size.sizes.append(1000)
    fit(module, callback, data=data())
    fit(plain, data=data())
    failed = [one["failed"] for one in callback.searches[0].branches]
    assert failed[1:] == [
        "out of memory: Unable to allocate 2 GiB",
        "the epoch has too few samples left for batches of 1000",
    ]
    assert module.seen == plain.seen
    assert equal(plain, module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # no checkpoints of resumed runs
def test_a_resumed_run_has_the_size_and_the_order(tmp_path):
    def run(*callbacks, **arguments):
        module, callback = Slow(dropout=0), tuner((RATE, 16))
        shuffled = data(shuffle=True, seed=7)
        return module, callback, fit(module, callback, *callbacks, data=shuffled, **arguments)

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    expected, search, trainer = run(saves, enable_checkpointing=True)
    assert search.setting["batch_size"] == 16
    behind = 16 + search.searches[0].trial_steps + 1
    for step in (3, 16, behind, 24, 30):  # in epoch 0, at its end, behind the winner, at the end of epoch 1, in epoch 2
        module, again, resumed = run(ckpt_path=tmp_path / f"step={step}.ckpt")
        assert again.setting == search.setting, step
        assert module.seen == expected.seen[-len(module.seen) :], step
        assert resumed.global_step == trainer.global_step
        assert equal(module, expected), step


class Stopped(BaseException):
    """Ends training, as a signal does."""


class Broken(Slow):
    breaks = 0

    def training_step(self, batch, batch_idx):
        tally.calls += 1
        if tally.calls == self.breaks:
            raise Stopped
        return super().training_step(batch, batch_idx)


class SavesOnError(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


def test_a_search_that_was_left_goes_on_in_the_same_order(tmp_path):
    """The order of its epoch was drawn, and training has had none of it."""

    def run(breaks, *callbacks, **arguments):
        tally.calls, module, callback = 0, Broken(dropout=0), tuner((1e-12, 4), (RATE, 16))
        module.breaks = breaks
        shuffled = data(shuffle=True, seed=7)
        fit(module, callback, *callbacks, data=shuffled, **arguments)
        return module, callback.setting

    expected, setting = run(0)
    assert setting == {"lr": RATE, "batch_size": 16}
    with pytest.raises(Stopped):
        run(55, SavesOnError(tmp_path / "left.ckpt"))
    module, again = run(0, ckpt_path=tmp_path / "left.ckpt")
    assert again == setting
    assert module.seen == expected.seen[-len(module.seen) :]
    assert equal(module, expected)


def stepwise(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}


class Sorted(BatchSampler):
    pass


class Unrepeatable:
    """Draws from the random numbers that training draws from, while it goes."""

    def __len__(self):
        return 128

    def __iter__(self):
        return (int(torch.randint(128, ())) for _ in range(128))


def test_what_cannot_change_is_refused():
    module = Slow()
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": stepwise(optimizer)}
    with pytest.raises(UnsupportedError, match=r"LinearLR counts steps.*interval='epoch'"):
        fit(module, tuner())
    with pytest.raises(UnsupportedError, match="must be a Choice of integers"):
        fit(Slow(), BranchTuner({"batch_size": Uniform(4, 8)}))
    with pytest.raises(UnsupportedError, match="overfit_batches replaces the sampler"):
        fit(Slow(), tuner(), overfit_batches=2)
    chosen = DataLoader(images(), batch_sampler=Sorted(SequentialSampler(images()), 8, False))
    with pytest.raises(UnsupportedError, match="the batch sampler Sorted chooses"):
        fit(Slow(), tuner(), data=chosen)
    with pytest.raises(TrainingDataError, match="come from a dict"):
        fit(Slow(), tuner(), data={"a": data()})
    with pytest.raises(TrainingDataError, match="come from a CombinedLoader"):
        fit(Slow(), tuner(), data=CombinedLoader([data(), data()]))
    with pytest.raises(TrainingDataError, match="the order of Unrepeatable cannot be repeated"):
        fit(Slow(), tuner((RATE, 16)), data=DataLoader(samples(), sampler=Unrepeatable(), batch_size=8))


def test_accumulation_limits_and_validation():
    """Trials keep a step to spare, and none reaches the next validation, whatever the size."""

    class Validated(Slow):
        def validation_step(self, batch, batch_idx):
            self.seen.append("validation")

    module, callback = Validated(), tuner((1e-12, 4), (RATE, 16), at_epochs=(0, 1, 2))
    arguments = {"accumulate_grad_batches": 2, "limit_train_batches": 32, "val_check_interval": 0.5}
    fit(module, callback, data=data(320), val=data(16), **arguments)
    assert callback.searches[0].setting["batch_size"] == 16
    assert module.seen.count("validation") == 12  # of two batches, twice an epoch
    assert sum(len(labels) for labels in module.seen if labels != "validation") == 3 * 32 * 8
