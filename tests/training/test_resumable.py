import random
import signal

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_egeria import AdaptiveBatchSize, FrozenPrefixCache, ResumableCheckpoints, SelectiveBackprop
from lightning_egeria.core.training.wrapping import WrappingDataModule
from lightning_egeria.errors import ArgumentError, CheckpointError
from support.jobs.stopped import BATCHES, EPOCHS, Net, fit
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("step", range(1, EPOCHS * BATCHES))
def test_a_stopped_run_ends_as_one_that_was_not(step, whole, tmp_path):
    assert fit(tmp_path, stop=step) == 75
    assert same(fit(tmp_path, resume=True), whole)


def test_a_signal_in_the_last_step_comes_too_late(whole, tmp_path):
    assert same(fit(tmp_path, stop=EPOCHS * BATCHES), whole)


@pytest.mark.parametrize("every", [None, 1, 3, 4, 5])
def test_a_killed_run_goes_on_from_the_latest_file(every, whole, tmp_path):
    fit(tmp_path, every_n_steps=every)  # the file is older than the end
    assert same(fit(tmp_path, resume=True, every_n_steps=every), whole)


def test_stopped_again_and_again(whole, tmp_path):
    for step in (2, 5, 8, 11):
        assert fit(tmp_path, stop=step, resume=step > 2) == 75
    assert same(fit(tmp_path, resume=True), whole)


def test_no_file_within_an_accumulation_window(tmp_path):
    expected = fit(tmp_path / "whole", accumulate=2)
    assert fit(tmp_path, stop=3, accumulate=2) == 75
    assert same(fit(tmp_path, resume=True, accumulate=2), expected)


def test_workers_draw_the_same_order(tmp_path):
    expected = fit(tmp_path / "whole", workers=1)
    assert fit(tmp_path, stop=6, workers=1) == 75
    assert same(fit(tmp_path, resume=True, workers=1), expected)


def adapting(loader, val):
    return AdaptiveBatchSize(loader, 16, batch_sizes={2: 12, 5: 16}, val_dataloaders=val)


def selecting(loader, val):
    return SelectiveBackprop(loader, mode="in_batch", share=0.5, val_dataloaders=val)


@pytest.mark.parametrize("wrap", [adapting, selecting])
def test_data_that_know_their_own_place(wrap, tmp_path):
    # A checkpoint ends the pair of gradients that a noise estimate is made of, so both runs save at the same steps.
    options = {"every_n_steps": 1, "wrap": wrap}
    expected = fit(tmp_path / "whole", **options)
    for step in (1, 3, 6):
        assert fit(tmp_path / str(step), stop=step, **options) == 75
        assert same(fit(tmp_path / str(step), resume=True, **options), expected)


class Random(Net):
    """Draws when an epoch begins, and where one ends."""

    def on_train_epoch_start(self):
        torch.rand(1)

    def on_train_epoch_end(self):
        torch.rand(1)


class Shuffled:
    """A sampler that draws from a generator of its own."""

    def __init__(self, data, own):
        self.size, self.own = len(data), own

    def __len__(self):
        return self.size

    def __iter__(self):
        order = list(range(self.size))
        if isinstance(self.own, torch.Generator):
            order = torch.randperm(self.size, generator=self.own).tolist()
        else:
            self.own.shuffle(order)
        return iter(order)


class Noisy(torch.utils.data.Dataset):
    """A dataset that draws from a generator of its own."""

    def __init__(self, data):
        self.data, self.own = data, np.random.default_rng(5)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs + self.own.normal(), label


def seeded():
    return torch.Generator().manual_seed(9)


DRAWING = {
    "the loader": lambda data: DataLoader(data, 8, shuffle=True, generator=seeded()),
    "the loader, with a worker": lambda data: DataLoader(data, 8, shuffle=True, generator=seeded(), num_workers=1),
    "a sampler by torch": lambda data: DataLoader(data, 8, sampler=Shuffled(data, seeded())),
    "a sampler by numpy": lambda data: DataLoader(data, 8, sampler=Shuffled(data, np.random.default_rng(3))),
    "a sampler by an older numpy": lambda data: DataLoader(data, 8, sampler=Shuffled(data, np.random.RandomState(3))),
    "a sampler by Python": lambda data: DataLoader(data, 8, sampler=Shuffled(data, random.Random(3))),
    "a dataset": lambda data: DataLoader(Noisy(data), 8, shuffle=True),
}


class Given(WrappingDataModule):
    def __init__(self, loader, val):
        super().__init__()
        self.wrap(loader, val)


def in_queue(loader, val):
    return SelectiveBackprop(loader, val_dataloaders=val)


@pytest.mark.parametrize(
    ("drawing", "wrap", "steps"),
    [
        *((drawing, Given, (3, 4, 6, 8, 9)) for drawing in DRAWING),
        ("the loader", FrozenPrefixCache, (4, 6, 9)),
        *((drawing, in_queue, (4, 6, 7)) for drawing in ("the loader", "a sampler by numpy", "a dataset")),
        *((drawing, adapting, (3, 4, 5, 7)) for drawing in ("the loader", "a sampler by numpy")),
        ("the loader, with a worker", adapting, (1, 3, 4, 5, 6, 7)),
    ],
)
def test_generators_that_loading_holds_draw_the_same(drawing, wrap, steps, tmp_path):
    def data(loader, val):
        own = DRAWING[drawing](loader.dataset)
        return wrap(own, val_dataloaders=val) if wrap is FrozenPrefixCache else wrap(own, val)

    options = {"every_n_steps": 1 if wrap is adapting else None, "wrap": data}
    expected = fit(tmp_path / "whole", **options)
    for step in steps:
        assert fit(tmp_path / str(step), stop=step, **options) == 75
        assert same(fit(tmp_path / str(step), resume=True, **options), expected), step


def test_other_generators_are_told(tmp_path):
    def held(loader, val):
        return Given(DRAWING["the loader"](loader.dataset), val)

    assert fit(tmp_path, stop=6, wrap=held) == 75
    with pytest.raises(UserWarning, match="resuming: the training loader, its sampler or its dataset hold other"):
        fit(tmp_path, resume=True)


@pytest.mark.parametrize(("workers", "steps"), [(0, (2, 4, 6)), (1, (2, 6))])
def test_hooks_that_draw_where_an_epoch_begins(workers, steps, tmp_path):
    """But workers that begin to load before such a hook, as they do if the file was written between two epochs."""
    expected = fit(tmp_path / "whole", workers=workers, model=Random())
    for step in steps:
        assert fit(tmp_path / str(step), stop=step, workers=workers, model=Random()) == 75
        assert same(fit(tmp_path / str(step), resume=True, workers=workers, model=Random()), expected), step


@pytest.mark.parametrize("workers", [0, 1])
def test_a_first_epoch_is_repeated_in_a_run_with_another_seed(workers, whole, tmp_path):
    def seeded_by(seed):
        def data(loader, val):
            torch.manual_seed(seed)
            return Given(loader, val)

        return data

    expected = fit(tmp_path / "whole", workers=workers, wrap=seeded_by(1))
    assert fit(tmp_path, stop=2, workers=workers, wrap=seeded_by(1)) == 75
    assert same(fit(tmp_path, resume=True, workers=workers, wrap=seeded_by(2)), expected)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "when",
    [{"save_on_train_epoch_end": True}, {"save_on_train_epoch_end": False}, {"every_n_train_steps": BATCHES // 2}],
)
def test_checkpoints_of_others_are_gone_on_from(when, tmp_path):
    """Also those behind the last batch of an epoch: the next one has all its batches."""
    # Lightning leaves out the ends of an epoch whose last step wrote the checkpoint.
    kind = Net if "every_n_train_steps" in when else Random

    def train(folder, ckpt_path=None):
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **when)
        callbacks = [ResumableCheckpoints(folder=folder), saving]
        return fit(folder, resume=ckpt_path is not None, ckpt_path=ckpt_path, callbacks=callbacks, model=kind())

    expected = train(tmp_path / "whole")
    paths = sorted((tmp_path / "whole").glob("step=*"))
    assert len(paths) >= EPOCHS
    for path in paths:
        assert same(train(tmp_path / path.stem, path), expected), path.name


def test_it_changes_nothing_in_a_run_that_is_not_stopped(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(ResumableCheckpoints, "_save", lambda self, trainer: None)
    for name in ("setup", "on_train_start", "on_train_epoch_start", "on_train_batch_end"):
        monkeypatch.setattr(ResumableCheckpoints, name, getattr(L.Callback, name))
    assert same(fit(tmp_path), whole)


def test_signals_mean_what_they_did_afterwards(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    fit(tmp_path)
    assert fit(tmp_path, stop=2) == 75
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_arguments(tmp_path, monkeypatch):
    monkeypatch.delenv("EGERIA_CHECKPOINTS", raising=False)
    with pytest.raises(ArgumentError, match="EGERIA_CHECKPOINTS is not set"):
        ResumableCheckpoints()
    with pytest.raises(ArgumentError, match="every_n_steps must be an integer of at least 1, got 0"):
        ResumableCheckpoints(0, tmp_path)
    monkeypatch.setenv("EGERIA_CHECKPOINTS", str(tmp_path))
    assert ResumableCheckpoints().path == tmp_path / "last.ckpt"


def test_a_damaged_state_is_refused(tmp_path):
    saving = ResumableCheckpoints(folder=tmp_path)
    state = saving.state_dict()
    (own,) = state["ranks"]
    for damaged in (None, [], [{**own, "batches": -1}], [{**own, "now": {"torch": 1}}]):
        with pytest.raises(CheckpointError, match="the resuming state in the checkpoint is damaged"):
            saving.load_state_dict({"version": 1, "ranks": damaged})
    with pytest.raises(CheckpointError, match="resuming state of version None, expected version 1"):
        saving.load_state_dict({"batches": 1})


def test_the_file_is_read_without_unpickling_classes(tmp_path):
    assert fit(tmp_path, stop=2) == 75
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    (state,) = (value for name, value in content["callbacks"].items() if "ResumableCheckpoints" in name)
    assert [own["batches"] for own in state["ranks"]] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert set(Net().state_dict()) == set(content["state_dict"])


def test_a_checkpoint_is_not_written_through_a_link(tmp_path):
    """Somebody may have laid one into a folder that several users share."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".last.ckpt").symlink_to(tmp_path / "mine")
    (tmp_path / "folder" / "last.ckpt").symlink_to(tmp_path / "mine")
    fit(tmp_path / "folder", every_n_steps=1)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "folder" / "last.ckpt").stat().st_size > 100


class OfRanks(L.Callback):
    """Random numbers of its own on each rank."""

    def on_train_epoch_start(self, trainer, pl_module):
        torch.manual_seed(10 * trainer.current_epoch + trainer.global_rank)


def resume_on_a_rank(folder):
    def train(name, **options):
        model, strategy = Net(), DDPStrategy(timeout=EXCHANGE_TIMEOUT)
        model.net[1] = nn.Identity()  # a checkpoint has the running statistics of rank 0 only
        callbacks = [ResumableCheckpoints(folder=folder / name), OfRanks()]
        return fit(folder / name, callbacks=callbacks, model=model, strategy=strategy, devices=2, **options)

    expected = train("whole")
    for step in (1, 3):
        assert train(str(step), stop=step) == 75
        assert same(train(str(step), resume=True), expected), step


@pytest.mark.slow
def test_each_rank_has_its_own_random_numbers_back(tmp_path):
    all_well(in_ranks(2, resume_on_a_rank, tmp_path))
