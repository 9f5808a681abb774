"""Selective-Backprop on cached entries is the same without the cache, bit for bit, and loads less."""

import pytest
import torch
from methods import scripted
from models import Classifier, ConvNet, equal, fit, images, loader
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_egeria import FrozenPrefixCache, SelectiveBackprop

LOADED = []  # an attribute of the dataset that changes would mean that the data do


class Noted(Dataset):
    """Notes what is loaded."""

    def __init__(self):
        self.data = images(48)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        LOADED.append(index)
        return self.data[index]


def run(cached, collate=default_collate, **options):
    torch.manual_seed(0)
    LOADED.clear()
    module = Classifier(ConvNet(dropout=0))
    batches = DataLoader(Noted(), 8, shuffle=True, collate_fn=collate)
    source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
    selecting = SelectiveBackprop(source, **options)
    fit(module, scripted({3: 1, 8: 2}), data=selecting, epochs=5)
    return module, selecting.selection, source


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch):
    """Whether it does is decided by the time that batches take."""
    monkeypatch.setattr("lightning_egeria.caching.stats.COMPARED_STEPS", 10**6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "in_batch"},
        {"mode": "in_batch", "staleness": 1, "full_every": 3},
        {"mode": "in_batch", "beta": 0, "share": 0.5},
    ],
)
def test_selection_and_training_are_those_without_the_cache(options):
    plain, selection, _ = run(False, **options)
    module, other, cache = run(True, **options)
    assert module.losses == plain.losses
    assert equal(module, plain)
    counts = [[(epoch, seen, trained) for epoch, seen, _, trained in one.epochs] for one in (selection, other)]
    assert counts[0] == counts[1]
    assert cache.stats.off is None
    if options.get("beta") == 0:  # batches are not looked at, so the front never ran on a whole one
        return
    # Each sample is loaded in the first epoch and for its entries, and few after that.
    assert len(LOADED) < 48 * 3 + 24
    assert cache.stats.not_loaded > 100


def test_a_collate_function_that_draws_is_not_run_again():
    def noisy(samples):
        x, labels = default_collate(samples)
        return x, labels, torch.rand(len(x))

    class Noisy(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        module = Noisy(ConvNet(dropout=0.2))  # so random numbers matter
        batches = DataLoader(Noted(), 8, collate_fn=noisy)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({3: 1}), data=SelectiveBackprop(source), epochs=4)
        found.append(module)
    assert equal(*found)


def test_samples_are_those_of_the_rows_where_collate_sorts():
    def sorted_by_label(samples):
        return default_collate(sorted(samples, key=lambda sample: int(sample[1])))

    plain, _, _ = run(False, sorted_by_label)
    module, _, cache = run(True, sorted_by_label)
    assert module.losses == plain.losses
    assert equal(module, plain)
    assert cache.stats.hits > 0


def test_without_a_freeze_it_is_out_of_the_way():
    found = []
    for cached in (False, True):
        module, batches = Classifier(), loader(shuffle=True)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({}), data=SelectiveBackprop(source, staleness=1))
        found.append(module)
    assert equal(*found)
