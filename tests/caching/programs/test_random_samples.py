"""Random augmentation, and samples that count or draw."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from support.caching import harness
from support.caching.parts import (
    SAMPLES,
    WORKERS,
    Classifier,
    Samples,
    grid,
    loader,
    on,
    vectors,
)

EPOCHS = 5


class Random(Dataset):
    """``draw(x, index, self)``: a sample from a random generator."""

    def __init__(self, draw):
        (self.x, self.y), self.draw, self.calls = vectors().tensors, draw, 0
        self.generator = torch.Generator().manual_seed(4)
        self.numpy, self.python = np.random.default_rng(4), random.Random(4)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.calls += 1
        return self.draw(self.x[index], index, self), self.y[index]


DRAWS = {
    "torch": lambda x, i, d: x + torch.randn(8),
    "numpy": lambda x, i, d: x + np.random.rand(),
    "python": lambda x, i, d: x + random.random(),
    "own generator": lambda x, i, d: x + torch.randn(8, generator=d.generator),
    "own numpy generator": lambda x, i, d: x + d.numpy.random(),
    "own python generator": lambda x, i, d: x + d.python.random(),
    "counter": lambda x, i, d: x + d.calls,
    "rare": lambda x, i, d: x + 1 if random.random() < 0.05 else x,
    "rare by index": lambda x, i, d: x + torch.rand(()) if i % 20 == 7 else x,
    "drawn, not used": lambda x, i, d: (torch.rand(3), x)[1],
    "seeded by the index": lambda x, i, d: x + torch.randn(8, generator=torch.Generator().manual_seed(int(i))),
    "seeds the global generator": lambda x, i, d: (torch.manual_seed(int(i)), x + torch.randn(8))[1],
    "system randomness": lambda x, i, d: x,
    "begins late": lambda x, i, d: x + torch.randn(8) if d.calls > 60 else x,
    "dropout": lambda x, i, d: torch.nn.functional.dropout(x, 0.3),
}


@pytest.mark.parametrize("draw", grid(DRAWS, every=4))
@WORKERS
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_random_augmentation(compare, draw, workers, seed):
    def program(run):
        data = {"num_workers": workers, "persistent_workers": workers > 0}
        run.fit(Classifier(), loader(Random(draw), **data), max_epochs=EPOCHS)

    compare(program, served=None, seed=seed)


def test_labels_are_drawn(compare):
    """Label noise, afresh in each epoch; the inputs are always the same."""

    def program(run):
        dataset = Samples(lambda d, i: (d.x[i], d.y[i] if random.random() < 0.9 else torch.tensor(0)))
        run.fit(Classifier(), loader(dataset), max_epochs=EPOCHS)

    compare(program, served=None)


def _scaled(samples):
    x, y = default_collate(samples)
    return x * 2, y


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("collate", [default_collate, _scaled])
def test_few_samples_are_augmented(compare, read, collate):
    """One sample in twenty, with and without others that read the batch."""

    def program(run):
        dataset = Samples(lambda d, i: (d.x[i] + torch.rand(()) if i == 13 else d.x[i], d.y[i]))
        reader = on(on_train_batch_end=lambda *args: run.note(args[-2][0].mean()) if run.batches % 3 == 2 else None)
        data = loader(dataset, collate_fn=collate)
        run.fit(Classifier(), data, *([reader] if read else []), max_epochs=EPOCHS)

    compare(program, served=None)


@pytest.mark.parametrize("collate", [default_collate, _scaled])
def test_each_sample_is_loaded_once(compare, collate):
    """While the front is frozen and inputs are loaded, no sample is loaded more often than without the cache."""
    counts = []

    def program(run):
        dataset = Random(lambda x, i, d: x + torch.rand(()) if i == 13 else x)
        run.fit(Classifier(), loader(dataset, collate_fn=collate), max_epochs=EPOCHS)
        counts.append(dataset.calls)

    compare(program, served=None)
    assert counts[1] <= counts[0]


@pytest.mark.slow
def test_samples_drawn_with_the_seed_of_the_loader(tmp_path):
    """It is new in each epoch, and only workers see it. The cache finds out at the start of the next epoch."""

    def sample(data, index):
        generator = torch.Generator().manual_seed(torch.utils.data.get_worker_info().seed + index)
        return data.x[index] + torch.randn(8, generator=generator), data.y[index]

    run = harness.ran(
        lambda run: run.fit(Classifier(), loader(Samples(sample), num_workers=2), max_epochs=6), True, tmp_path / "run"
    )
    (cached,) = run.caches
    assert run.error is None
    assert cached.stats.hits == 0
