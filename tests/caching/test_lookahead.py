"""Selective-Backprop on cached entries is the same without the cache, bit for bit, and loads less."""

import pytest
import torch
from methods import scripted
from models import Classifier, ConvNet, Transformer, equal, fit, images, loader
from torch import nn
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


class Texts(Dataset):
    """Texts of two to five tokens."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (2 + index % 4,), generator=generator), index % 3


def padded(samples):
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


def of_one_length(samples):
    texts, labels = padded(samples)
    return nn.functional.pad(texts, (0, 5 - texts.shape[1])), labels


@pytest.mark.parametrize(
    ("collate", "options"),
    [(padded, {"mode": "in_batch"}), (of_one_length, {}), (of_one_length, {"mode": "in_batch", "share": 0.25})],
)
def test_samples_of_texts_come_from_entries(collate, options):
    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        module = Classifier(Transformer(dropout=0))
        batches = DataLoader(Texts(), 8, shuffle=True, collate_fn=collate)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({1: 2}), data=SelectiveBackprop(source, **options), epochs=6)
        found.append(module)
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-5)
    assert source.stats.off is None
    assert source.stats.hits > 3 * 48


def test_behind_hooks_for_batches_samples_are_those_of_the_hooks():
    class Brighter(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, labels = batch
            return x + torch.rand(1), labels

    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        module = Brighter(ConvNet(dropout=0))
        source = FrozenPrefixCache(loader(images(48)), min_free_bytes=0) if cached else loader(images(48))
        fit(module, scripted({3: 1}), data=SelectiveBackprop(source), epochs=3)
        found.append(module)
    assert equal(*found)
