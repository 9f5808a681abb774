"""Collate functions: which of them make, of each sample, a row of its own."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from cached_runs import Classifier, fit, images
from test_loaders import compare
from test_same_training import assert_same_training, pair
from test_texts import TextClassifier, Texts, padded
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_egeria.caching.findings import Inspector

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

RANDOM = "off: the collate function draws random numbers"
MIXED = "off: the collate function mixes or reorders samples"


def mixed_up(samples):
    x, y = default_collate(samples)
    share, places = float(torch.rand(())), torch.randperm(len(x))
    return share * x + (1 - share) * x[places], y


def torch_noise(samples):
    x, y = default_collate(samples)
    return x + torch.randn_like(x), y


def numpy_noise(samples):
    x, y = default_collate(samples)
    return x + np.float32(np.random.rand()), y  # noqa: NPY002 - what collate functions draw from


def rarely_flipped(samples):
    x, y = default_collate(samples)
    return x.flip(-1) if random.random() < 1e-6 else x, y


class OwnNoise:
    """Draws from a generator that nobody else knows."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, samples):
        x, y = default_collate(samples)
        return x + torch.randn(x.shape, generator=self.generator), y


def by_brightness(samples):
    return default_collate(sorted(samples, key=lambda sample: -float(sample[0].sum())))


def with_their_neighbours(samples):
    x, y = default_collate(samples)
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def without_their_mean(samples):
    x, y = default_collate(samples)
    return x - x.mean(0), y


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("views", [0, 2])
def test_mixing_in_the_collate_function_keeps_the_cache_off(tmp_path, views, workers):
    plain, cached = pair(Classifier)
    data = [DataLoader(images(), 8, shuffle=True, collate_fn=mixed_up, num_workers=workers) for _ in range(2)]
    fit(plain, data[0], {2: 2})
    with pytest.warns(UserWarning, match=RANDOM):
        wrapped = fit(cached, data[1], {2: 2}, {"cache_dir": tmp_path / "cache", "augmentation_views": views})
    assert_same_training(plain, cached)
    assert wrapped.stats.hits == 0


@pytest.mark.parametrize("collate", [torch_noise, numpy_noise, rarely_flipped])
def test_random_numbers_in_the_collate_function_keep_the_cache_off(tmp_path, collate):
    with pytest.warns(UserWarning, match=RANDOM):
        compare(tmp_path, lambda: DataLoader(images(), 8, shuffle=True, collate_fn=collate), epochs=4)


def test_a_generator_of_its_own_keeps_the_cache_off(tmp_path):
    module, _ = pair(Classifier)
    with pytest.warns(UserWarning, match=RANDOM):
        fit(module, DataLoader(images(), 8, collate_fn=OwnNoise()), {2: 2}, {"cache_dir": tmp_path / "cache"})


@pytest.mark.parametrize("collate", [by_brightness, with_their_neighbours, without_their_mean])
def test_rows_that_are_not_those_of_their_sample_keep_the_cache_off(tmp_path, collate):
    with pytest.warns(UserWarning, match=MIXED):
        compare(tmp_path, lambda: DataLoader(images(), 8, shuffle=True, collate_fn=collate), epochs=4)


def longest_first(samples):
    return padded(sorted(samples, key=lambda sample: -len(sample["ids"])))


def padded_left(samples):
    texts = [sample["ids"].flip(0) for sample in samples]
    ids = pad_sequence(texts, batch_first=True).flip(1)
    return {"ids": ids, "mask": ids != 0, "label": torch.stack([sample["label"] for sample in samples])}


def test_texts_that_are_sorted_by_length_keep_the_cache_off(tmp_path):
    plain, cached = pair(TextClassifier)
    data = [DataLoader(Texts(), 8, shuffle=True, collate_fn=longest_first) for _ in range(2)]
    fit(plain, data[0], {2: 2})
    with pytest.warns(UserWarning, match=rf"{MIXED}.*leave FrozenPrefixCache out to have the dropout .* on"):
        fit(cached, data[1], {2: 2}, {"cache_dir": tmp_path / "cache"})
    assert_same_training(plain, cached)


class Summed(nn.Module):
    """Each position by itself."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, ids, mask):
        return self.head((self.layers(self.embedding(ids)) * mask[..., None]).sum(1))


def test_padding_is_no_mixing(tmp_path):
    class OfWords(TextClassifier):
        def __init__(self):
            super().__init__()
            self.net = Summed()

    plain, cached = pair(OfWords)
    data = [DataLoader(Texts(), 8, shuffle=True, collate_fn=padded) for _ in range(2)]
    fit(plain, data[0], {2: 2})
    wrapped = fit(cached, data[1], {2: 2}, {"cache_dir": tmp_path / "cache"})
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 40


@pytest.mark.parametrize("collate", [padded, padded_left])
def test_rows_of_padded_texts_are_those_of_their_samples(collate):
    texts = Texts()
    loaded = [texts[number] for number in range(8)]
    inspector = Inspector(texts, lambda ids, seeds: [texts[number] for number in ids], collate)
    found = inspector.examine(range(8), None, loaded)
    assert found.problem is None
    assert found.own_rows == {0, 1, 2}


def test_a_collate_function_that_takes_its_samples_apart(tmp_path):
    class Fields(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            image, label = images()[index]
            return {"image": image.clone(), "label": label}

    def apart(samples):
        labels = torch.stack([sample.pop("label") for sample in samples])
        return torch.stack([sample["image"].mul_(0.5) for sample in samples]), labels

    wrapped = compare(tmp_path, lambda: DataLoader(Fields(), 8, shuffle=True, collate_fn=apart))
    assert wrapped.stats.hits > 40


def test_a_collate_function_that_takes_samples_of_its_own_kind_apart(tmp_path):
    class Ordered(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            image, label = images()[index]
            return OrderedDict(image=image.flatten().tolist(), label=int(label))

    def apart(samples):
        labels = torch.tensor([sample.pop("label") for sample in samples])
        return torch.tensor([sample.pop("image") for sample in samples]).view(-1, 3, 8, 8), labels

    wrapped = compare(tmp_path, lambda: DataLoader(Ordered(), 8, shuffle=True, collate_fn=apart))
    assert wrapped.stats.hits > 40


def test_a_collate_function_that_takes_whole_batches_only(tmp_path):
    def of_eight(samples):
        if len(samples) != 8:
            raise ValueError("eight are wanted")
        return default_collate(samples)

    with pytest.warns(UserWarning, match=r"a part of the batch again \(ValueError: eight are wanted\)"):
        compare(tmp_path, lambda: DataLoader(images(), 8, shuffle=True, collate_fn=of_eight), epochs=4)


class Unreadable(Dataset):
    """Gives None for some samples, or a sample without an image."""

    def __init__(self, numbers, instead=None):
        self.data = images()
        self.numbers = numbers
        self.instead = instead

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.instead if index in self.numbers else self.data[index]


def readable(samples):
    return [sample for sample in samples if sample is not None and sample[0] is not None]


def dropping(samples):
    return default_collate(readable(samples))


def refilling(samples):
    kept = readable(samples)
    return default_collate(kept + kept[: len(samples) - len(kept)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("instead", [None, (None, 0)])
@pytest.mark.parametrize("collate", [dropping, refilling])
def test_samples_that_cannot_be_read(tmp_path, collate, instead, workers):
    """Their batches are neither written nor taken from the cache."""

    def data():
        # In order, so that it is not in the batch that is examined.
        return DataLoader(Unreadable((37,), instead), 8, collate_fn=collate, num_workers=workers)

    wrapped = compare(tmp_path, data)
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded > 40
    assert wrapped.stats.written == 32


def test_the_examined_batch_has_a_sample_that_cannot_be_read(tmp_path):
    """The next one is examined."""
    unreadable = Unreadable(range(16))
    wrapped = compare(tmp_path, lambda: DataLoader(unreadable, 8, collate_fn=refilling_from(unreadable.data)))
    assert wrapped.stats.hits > 40
    assert wrapped.stats.written == 24


def refilling_from(data):
    return lambda samples: default_collate([data[0] if sample is None else sample for sample in samples])


def test_no_batch_without_a_sample_that_cannot_be_read(tmp_path):
    unreadable = Unreadable(range(0, 40, 8))
    with pytest.warns(UserWarning, match="off: none of 10 batches showed whether it can be done"):
        compare(tmp_path, lambda: DataLoader(unreadable, 8, collate_fn=dropping))


def test_a_collate_function_that_drops_samples(tmp_path):
    """A batch with fewer rows than samples is neither written nor taken from the cache."""

    def bright(samples):
        return default_collate([sample for sample in samples if float(sample[0].mean()) > lowest])

    means = sorted(float(image.mean()) for image, _ in images())
    lowest = (means[0] + means[1]) / 2
    wrapped = compare(tmp_path, lambda: DataLoader(images(), 8, shuffle=True, collate_fn=bright))
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 40


class OtherFields(Dataset):
    """One sample has its fields in another order, which the collate function does not mind."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        image, label = images()[index]
        return {"image": image, "label": label} if index != 39 else {"label": label, "image": image}


class ByName(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["image"], batch["label"]), batch_idx)


def test_a_sample_of_another_structure(tmp_path):
    wrapped = compare(tmp_path, lambda: DataLoader(OtherFields(), 8), ByName)
    assert wrapped.stats.hits > 40
    assert wrapped.stats.written == 32
