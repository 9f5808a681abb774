"""Data loaders: samplers, workers, iterables, several loaders, and others who read them."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from support.caching.parts import (
    BATCH,
    SAMPLES,
    WORKERS,
    Classifier,
    Samples,
    Stepping,
    Validated,
    data_of,
    grid,
    loader,
    vectors,
)


def _batches(sizes, epochs=6):
    """Batches of these sizes, in another order in each epoch."""
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(SAMPLES).tolist()
        yield [[order.pop() for _ in range(size)] for size in sizes]


class Stateful:
    """A batch sampler with an epoch of its own, and batches of several sizes."""

    def __init__(self, *sizes):
        self.sizes, self.epochs = sizes, _batches(sizes)

    def __iter__(self):
        return iter(next(self.epochs))

    def __len__(self):
        return len(self.sizes)


class Growing(Stateful):
    """Each epoch has larger batches."""

    def __init__(self):
        self.size = 4

    def __iter__(self):
        self.size += 1
        yield from (rows.tolist() for rows in torch.randperm(SAMPLES).split(self.size))

    def __len__(self):
        return 4


class Endless(Stateful):
    """Without a length, and without an end."""

    def __iter__(self):
        while True:
            yield random.sample(range(SAMPLES), BATCH)

    __len__ = None


class Bucketed(Stateful):
    """By a key of the samples, shuffled within buckets."""

    def __iter__(self):
        buckets = [list(range(k, SAMPLES, 4)) for k in range(4)]
        random.shuffle(buckets)
        for bucket in buckets:
            random.shuffle(bucket)
            yield bucket

    def __len__(self):
        return 4


SAMPLERS = {
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)},
    "weighted without replacement": lambda: {
        "sampler": WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 18, replacement=False)
    },
    "random with replacement": lambda: {"sampler": RandomSampler(range(SAMPLES), replacement=True)},
    "more than there are": lambda: {"sampler": RandomSampler(range(SAMPLES), num_samples=40)},
    "some of them": lambda: {"sampler": RandomSampler(range(SAMPLES), num_samples=13)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(0, SAMPLES, 2))},
    "sequential": lambda: {"sampler": SequentialSampler(range(SAMPLES))},
    "list": lambda: {"sampler": [5, 3, 3, 7, 1, 0, 23, 11, 5, 5, 2, 8]},
    "tensor indices": lambda: {"sampler": torch.arange(SAMPLES)},
    "numpy indices": lambda: {"sampler": np.arange(SAMPLES)[::-1]},
    "negative indices": lambda: {"sampler": list(range(-SAMPLES, 0))},
    "with a generator": lambda: {"sampler": RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 5, drop_last=True)},
    "list of batches": lambda: {"batch_sampler": torch.arange(SAMPLES).view(4, 6).tolist()},
    "tuples": lambda: {"batch_sampler": [(0, 1, 2), (3, 4, 5, 6), (7, 8), (1, 9, 10)]},
    "stateful": lambda: {"batch_sampler": Stateful(6, 4, 8, 6)},
    "growing": lambda: {"batch_sampler": Growing()},
    "endless": lambda: {"batch_sampler": Endless()},
    "bucketed": lambda: {"batch_sampler": Bucketed()},
    "drop_last": lambda: {"batch_size": 7, "drop_last": True},
    "batch of its own size": lambda: {"batch_size": SAMPLES},
    "larger than the data": lambda: {"batch_size": 100},
    "generator": lambda: {"generator": torch.Generator().manual_seed(3)},
    "not shuffled": lambda: {"shuffle": False},
    "in order": lambda: {"in_order": False},
    "pinned": lambda: {"pin_memory": False, "timeout": 0},
}


@pytest.mark.parametrize("options", grid(SAMPLERS, every=4))
@WORKERS
@pytest.mark.usefixtures("written_at_once")
def test_sampler(compare, options, workers):
    if workers and options is SAMPLERS["tensor indices"]:
        pytest.skip("torch keeps a thread in this process that shares tensors with workers")
    if workers and options is SAMPLERS["in order"]:
        pytest.skip("batches arrive in another order in each run")
    if workers and options is SAMPLERS["stateful"]:
        pytest.skip("torch complains about an iterator whose sampler is at its end, without the cache too")

    def program(run):
        run.fit(Classifier(), loader(num_workers=workers, **options()), max_epochs=5, limit_train_batches=5)

    # Samples in batches of a size that never comes again, a loader without a length, and too few steps.
    compare(
        program,
        served=None
        if options in [SAMPLERS[name] for name in ("growing", "endless", "batch of its own size")]
        else True,
    )


def test_sampler_that_follows_the_losses(compare):
    """Hard samples come more often."""

    def program(run):
        losses = torch.ones(SAMPLES)

        def step(module, x, y, ids):
            each = F.cross_entropy(module.net(x), y, reduction="none")
            losses[ids] = each.detach()
            return each.mean()

        data = DataLoader(
            Samples(lambda d, i: (d.x[i], d.y[i], i)), BATCH, sampler=WeightedRandomSampler(losses, SAMPLES)
        )
        data.sampler.weights = losses
        module = Stepping(step)
        module.training_step = lambda batch, batch_idx: step(module, *batch)
        run.fit(module, data, max_epochs=4)

    compare(program)


class Fetches(Dataset):
    """Loads a whole batch at once."""

    def __init__(self):
        self.data, self.batches = vectors(), 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.data[index]

    def __getitems__(self, indices):
        return [self.data[index] for index in indices]


class OnlyFetches(Fetches):
    __getitem__ = None


class Keyed(Dataset):
    def __init__(self, keys):
        self.data, self.place = vectors(), {key: place for place, key in enumerate(keys)}

    def __len__(self):
        return SAMPLES

    def __getitem__(self, key):
        return self.data[self.place[key]]


KEYS = {
    "texts": [f"image-{i}" for i in range(SAMPLES)],
    "large numbers": [10**12 + i for i in range(SAMPLES)],
    "huge numbers": [10**30 + i for i in range(SAMPLES)],
    "negative numbers": [-5 * i - 1000 for i in range(SAMPLES)],
    "tuples": [(i, 224) for i in range(SAMPLES)],
    "floats": [i + 0.5 for i in range(SAMPLES)],
    "bytes": [b"%d" % i for i in range(SAMPLES)],
    "mixed": [i if i % 2 else str(i) for i in range(SAMPLES)],
    "frozen sets": [frozenset({i}) for i in range(SAMPLES)],
}


@pytest.mark.parametrize("keys", grid(KEYS, every=4))
@WORKERS
def test_ids_of_samples(compare, keys, workers):
    batches = [keys[start : start + BATCH] for start in range(0, SAMPLES, BATCH)]
    data = {"batch_sampler": batches, "num_workers": workers}
    compare(lambda run: run.fit(Classifier(), loader(Keyed(keys), **data)), served=None)


def test_ids_that_are_not_hashable(compare):
    class Boxes(Keyed):
        def __getitem__(self, key):
            return self.data[key[0]]

    batches = [[[i], [i + 1], [i + 2]] for i in range(0, SAMPLES, 3)]
    compare(lambda run: run.fit(Classifier(), loader(Boxes([]), batch_sampler=batches)), served=None)


@pytest.mark.parametrize("dataset", [Fetches, OnlyFetches])
@WORKERS
def test_whole_batches_are_fetched(compare, dataset, workers):
    compare(lambda run: run.fit(Classifier(), loader(dataset(), num_workers=workers)), served=None)


class Streams(IterableDataset):
    def __init__(self, length=None):
        self.data, self.length = vectors(), length

    def __iter__(self):
        yield from (self.data[index] for index in torch.randperm(SAMPLES).tolist())


class Lengthy(Streams):
    def __len__(self):
        return SAMPLES


@pytest.mark.parametrize("dataset", [Streams, Lengthy])
def test_iterable_data_set(compare, dataset):
    compare(lambda run: run.fit(Validated(), loader(dataset()), val=loader(shuffle=False)), served=None)


def test_batches_without_a_batch_size(compare):
    """``batch_size=None``: the data set returns whole batches."""
    data = {"batch_size": None, "shuffle": True}

    def program(run):
        dataset = Samples(lambda d, i: (d.x[i * 6 : i * 6 + 6], d.y[i * 6 : i * 6 + 6]), samples=24)
        dataset.samples = 4
        run.fit(Classifier(), loader(dataset, **data), max_epochs=4)

    compare(program, served=None)


class OwnLoader:
    """No DataLoader at all."""

    def __init__(self):
        self.x, self.y = vectors().tensors

    def __iter__(self):
        for rows in torch.randperm(SAMPLES).split(BATCH):
            yield self.x[rows], self.y[rows]

    def __len__(self):
        return 4


class Wrapped(OwnLoader):
    """Around a DataLoader."""

    def __init__(self):
        self.loader = loader()

    def __iter__(self):
        for x, y in self.loader:
            yield x * 2, y

    def __len__(self):
        return len(self.loader)


class Subclass(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x + 1, y


@pytest.mark.parametrize("make", [OwnLoader, Wrapped, lambda: Subclass(vectors(), BATCH)])
def test_loader_of_another_class(compare, make):
    compare(lambda run: run.fit(Classifier(), make()), served=None)


class Several(Classifier):
    """Trains on the batches of all loaders together, or on the first and a penalty of the second."""

    def __init__(self, together):
        super().__init__()
        self.together = together

    def training_step(self, batch, batch_idx):
        (x, y), (other, labels) = batch.values() if isinstance(batch, dict) else batch
        if self.together:
            return F.cross_entropy(self.net(torch.cat([x, other])), torch.cat([y, labels]))
        return F.cross_entropy(self.net(x), y) + other.square().mean() * self.net.head.weight.square().mean()


def _two():
    return {"first": loader(), "second": loader(vectors(seed=2), batch_size=4)}


@pytest.mark.parametrize(
    "make", [_two, lambda: list(_two().values()), lambda: CombinedLoader(_two(), "max_size_cycle")]
)
@pytest.mark.parametrize("together", [True, False])
def test_several_loaders(compare, make, together):
    compare(lambda run: run.fit(Several(together), data_of(train_dataloader=make)), served=None)
