"""The data module around the user's own."""

import copy
import pickle
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_egeria import FrozenPrefixCache
from lightning_egeria.caching import stats
from lightning_egeria.errors import ArgumentError
from support.caching import harness
from support.caching.parts import BATCH, Classifier, Samples, Stepping, Validated, data_of, loader, on, vectors


@pytest.fixture
def run(tmp_path):
    """A run with the cache."""
    torch.manual_seed(0)
    return harness.Run(True, tmp_path / "run")


def stats_of(run):
    return run.caches[-1].stats


@pytest.mark.parametrize("name", ["max_bytes", "min_free_bytes", "host_bytes", "device_bytes", "augmentation_views"])
def test_numbers_are_integers_of_at_least_zero(tmp_path, name):
    with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 0, got -1"):
        FrozenPrefixCache(loader(), cache_dir=tmp_path, **{name: -1})
    with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 0, got 1.5"):
        FrozenPrefixCache(loader(), cache_dir=tmp_path, **{name: 1.5})


def test_precision_is_a_known_one(tmp_path):
    with pytest.raises(ArgumentError, match="entry_precision must be 'bf16', 'int8' or None, got 'fp8'"):
        FrozenPrefixCache(loader(), cache_dir=tmp_path, entry_precision="fp8")


def test_cache_around_a_cache_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="datamodule is a FrozenPrefixCache already"):
        FrozenPrefixCache(FrozenPrefixCache(loader(), cache_dir=tmp_path), cache_dir=tmp_path)


def test_validation_loaders_are_for_a_dataloader():
    with pytest.raises(ArgumentError, match="val_dataloaders is for a DataLoader"):
        FrozenPrefixCache(data_of(train_dataloader=loader), val_dataloaders=loader())


def test_attributes_are_those_of_the_users_own(tmp_path):
    own = data_of(train_dataloader=loader)
    own.batch_size = 4
    cached = FrozenPrefixCache(own, cache_dir=tmp_path)
    cached.batch_size, cached.folder = 8, "data"
    assert (own.batch_size, own.folder, cached.folder) == (8, "data", "data")
    with pytest.raises(AttributeError):
        _ = cached.something


class Data(L.LightningDataModule):
    def __init__(self, scale=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale

    def train_dataloader(self):
        return loader()

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


def test_copy_is_a_data_module_of_its_own(tmp_path):
    data = Data()
    copied = pickle.loads(pickle.dumps(FrozenPrefixCache(data, cache_dir=tmp_path)))
    copied.scale = 2.0
    copied.cache_dir = tmp_path / "other"
    assert (copied.datamodule.scale, data.scale) == (2.0, 1.0)
    assert "cache_dir" not in vars(copied.datamodule)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_loader_that_is_copied_is_the_users(run, make):
    given = loader(shuffle=True)
    run.fit(Classifier(), given)
    used = run.caches[-1].trainer.train_dataloader
    copied = make(used)
    assert (type(used) is DataLoader, type(copied) is DataLoader) == (False, True)
    assert vars(copied).keys() == vars(used).keys() == vars(given).keys()
    assert len(list(copied)) == len(given)
    assert type(make(run.caches[-1])) is FrozenPrefixCache


def test_state_and_hyperparameters_are_the_users_own(tmp_path):
    cached = FrozenPrefixCache(Data(scale=3.0), cache_dir=tmp_path)
    assert dict(cached.hparams) == dict(cached.hparams_initial) == {"scale": 3.0}
    other = FrozenPrefixCache(Data(), cache_dir=tmp_path)
    other.load_state_dict(cached.state_dict())
    assert other.scale == 3.0


def plain_trainer(epochs):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, **quiet)


def test_a_loader_in_the_place_of_the_folder_is_refused():
    with pytest.raises(ArgumentError, match=r"got DataLoader. Pass a loader for validation as val_dataloaders=..."):
        FrozenPrefixCache(loader(), loader())


def test_where_nothing_is_frozen_it_does_nothing(tmp_path, caplog):
    cached = FrozenPrefixCache(loader(), cache_dir=tmp_path / "cache")
    with caplog.at_level("INFO"):
        plain_trainer(1).fit(Classifier(), datamodule=cached)
    assert caplog.text.count("nothing was cached, because no module is frozen") == 1
    assert cached.stats.off == cached.validation_stats.off == "nothing is frozen"
    assert (cached.stats.hits, cached.stats.misses) == (0, 0)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.usefixtures("written_at_once")
def test_it_needs_no_callback(tmp_path):
    model, cached = Classifier(), FrozenPrefixCache(loader(), cache_dir=tmp_path / "cache")
    model.net.a.requires_grad_(False).eval()
    trainer = plain_trainer(2)
    before = list(trainer.callbacks)
    trainer.fit(model, datamodule=cached)
    assert (cached.stats.hits, cached.stats.misses) == (24, 24)  # the second epoch, the first
    assert trainer.callbacks == before


def test_validation_without_sample_ids_says_so(compare, caplog):
    class Streamed(IterableDataset):
        def __iter__(self):
            return iter(vectors())

    with caplog.at_level("INFO"):
        run = compare(lambda run: run.fit(Validated(), val=DataLoader(Streamed(), BATCH)))
    assert run.caches[0].validation_stats.off == "an IterableDataset has no sample ids"
    assert caplog.text.count("the cache of validation is off: an IterableDataset has no sample ids") == 1


def test_runs_share_a_store_and_the_second_starts_warm(compare):
    def program(run):
        for _ in range(2):
            torch.manual_seed(0)
            run.fit(Classifier(), schedule={1: 2}, max_epochs=4)

    run = compare(program)
    first, second = (cached.stats for cached in run.caches)
    assert (first.written, second.written) == (24, 0)
    assert second.hits > first.hits
    assert len(list(run.cache_dir.iterdir())) == 1


@pytest.mark.parametrize(("step", "views", "reads"), [(9, 0, True), (13, 0, False), (2, 2, True), (9, 2, False)])
def test_what_is_not_read_again_is_not_written(compare, step, views, reads):
    """Of four epochs with four steps, the fourth reads what the third has written; with two views, the second."""
    cache = {"augmentation_views": views}
    run = compare(lambda run: run.fit(Classifier(), cache=cache, schedule={step: 2}, max_epochs=4), served=None)
    assert stats_of(run).off is None
    assert (stats_of(run).written > 0) == (stats_of(run).hits > 0) == reads


def test_sampler_with_replacement_may_read_again(compare):
    def program(run):
        sampler = torch.utils.data.RandomSampler(vectors(), replacement=True, num_samples=96)
        run.fit(Classifier(), loader(sampler=sampler), schedule={2: 2}, max_epochs=1)

    assert stats_of(compare(program)).hits > 0


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_augmentation_views_change_and_come_back(run, workers):
    seen = {}

    def sample(data, index):
        return data.x[index] + torch.rand(8), index

    def step(module, x, index):
        for row, number in zip(x.tolist(), index.tolist(), strict=True):
            seen[module.current_epoch, number] = row
        return module.net(x).square().mean()

    cache = {"augmentation_views": 2, "max_bytes": 0}
    with pytest.warns(UserWarning, match="max_bytes=0 is reached"):
        run.fit(
            Stepping(step), loader(Samples(sample), num_workers=workers), cache=cache, schedule={1: 2}, max_epochs=5
        )
    for number in range(24):
        first, second, third, fourth = (seen[epoch, number] for epoch in range(1, 5))
        assert (first, second) == (third, fourth)
        assert first != second
    assert len({tuple(seen[1, number]) for number in range(24)}) == 24


@pytest.mark.filterwarnings("ignore:.*max_bytes=0 is reached")
@pytest.mark.parametrize("views", [1, 3])
def test_cached_views_are_the_views(tmp_path, views):
    """One run has no room for an entry."""
    losses = []
    for max_bytes in (0, 10**9):
        one = harness.Run(True, tmp_path / f"{max_bytes}")
        torch.manual_seed(0)
        sample = Samples(lambda data, index: (data.x[index] + torch.rand(8), data.y[index]))
        one.fit(
            Classifier(),
            loader(sample),
            cache={"augmentation_views": views, "max_bytes": max_bytes, "seed": 5},
            schedule={1: 2},
            max_epochs=8,
        )
        losses.append([value for name, value in one.recorded if name.startswith("outputs")])
    assert losses[0] == losses[1]
    assert stats_of(one).hits > 24
    assert stats_of(one).written >= 18 * views


@pytest.mark.filterwarnings("ignore:.*max_bytes=0 is reached")
def test_seeds_give_other_views(tmp_path):
    seen = []
    for seed in (0, 1):
        one, rows = harness.Run(True, tmp_path / f"{seed}"), {}

        def step(module, x, index, rows=rows):
            rows |= dict(zip(index.tolist(), x.tolist(), strict=True))
            return module.net(x).square().mean()

        data = loader(Samples(lambda data, index: (data.x[index] + torch.rand(8), index)))
        cache = {"augmentation_views": 2, "seed": seed, "max_bytes": 0}
        one.fit(Stepping(step), data, cache=cache, schedule={1: 2})
        seen.append(rows)
    assert all(seen[0][number] != seen[1][number] for number in range(24))


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bar_shows_the_share_that_is_recorded(run, monkeypatch, bar):
    monkeypatch.setattr("lightning_egeria.caching.entries.COUNT_EVERY_S", -1.0)
    seen = {}

    def look(trainer, module, *_):
        seen[trainer.global_step] = trainer.progress_bar_callback.get_metrics(trainer, module).get("cached")

    trainer = run.fit(Classifier(), None, bar(), on(on_train_batch_end=look), enable_progress_bar=True, max_epochs=4)
    assert seen[2] is None
    assert {text for text in seen.values() if text is not None} <= {f"{share}%" for share in range(100)}
    assert any(text not in (None, "0%") for text in seen.values())
    assert seen[16] is None  # all is there
    assert "get_metrics" not in vars(trainer.progress_bar_callback)


def _slowly(data, index):
    time.sleep(0.002)
    return data.x[index], data.y[index]


def test_it_says_what_it_saved(run, caplog):
    with caplog.at_level("INFO"):
        run.fit(Classifier(), loader(Samples(_slowly, samples=60)), max_epochs=8)
    assert caplog.text.count("samples came from the cache, ") == 1
    assert "s saved" in caplog.text
    assert stats_of(run).off is None
    assert stats_of(run).seconds_saved > 0


def test_it_stops_where_it_does_not_pay(run, monkeypatch):
    monkeypatch.setattr(
        stats.Accounts, "judgement", lambda self, device, batches: (False, "2 ms from the cache and 1 ms without")
    )
    with pytest.warns(UserWarning, match="off: it does not pay: 2 ms from the cache and 1 ms without"):
        run.fit(Classifier(), loader(vectors(60)), max_epochs=3)
    assert stats_of(run).off.startswith("it does not pay")
    assert list(run.cache_dir.iterdir()) == []


def test_invalidated_samples_are_compared(compare):
    """Files that a program rewrites."""

    def program(run):
        table = {index: vectors()[index][0] for index in range(24)}
        hidden = (table.__getitem__, table.__setitem__)

        def rewrite(trainer, module):
            if trainer.current_epoch == 2:
                hidden[1](5, hidden[0](5) * 2)
                if run.cached:
                    run.caches[-1].invalidate([5])

        data = loader(Samples(lambda data, index: (hidden[0](index), data.y[index])))
        run.fit(Classifier(), data, on(on_train_epoch_end=rewrite), max_epochs=5)

    run = compare(program)
    assert stats_of(run).off is None


def test_loss_of_a_cached_run_is_a_number(run):
    """What a program logs is an ordinary tensor."""
    seen = []
    step = Stepping(lambda module, x, y: seen.append(F.cross_entropy(module.net(x), y)) or seen[-1])
    run.fit(step, max_epochs=4)
    assert {type(loss) for loss in seen} == {torch.Tensor}


class Disturbed(Classifier):
    """Calls the network with other inputs than the batch's, in training in the fourth epoch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + (self.current_epoch == 3) * torch.rand_like(x), y), batch_idx)


def test_at_the_end_it_says_what_did_not_fit(run, caplog):
    with caplog.at_level("INFO"):
        run.fit(Disturbed(), loader(), max_epochs=5)
    found = stats_of(run)
    (line,) = [text for text in caplog.text.splitlines() if "samples came from the cache, " in text]
    assert found.unused > 0
    assert f"{found.unused} entries were rejected because the frozen layers got other inputs" in line
