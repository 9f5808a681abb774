"""Data loaders: samplers, workers, iterables, several loaders, and others who read them."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from programs.harness import BATCH, SAMPLES, Classifier, Samples, Stepping, Validated, data_of, loader, on, vectors
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
    get_worker_info,
)

WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])


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
    """Each epoch has larger batches; the indices are tensors."""

    def __init__(self):
        self.size = 4

    def __iter__(self):
        self.size += 1
        yield from torch.randperm(SAMPLES).split(self.size)

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


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
@WORKERS
def test_sampler(compare, options, workers):
    def program(run):
        run.fit(Classifier(), loader(num_workers=workers, **options()), max_epochs=5, limit_train_batches=5)

    compare(program)


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


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
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


# Workers.
class OpensInWorkers(Dataset):
    file = None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.file[index]


def _open(worker):
    get_worker_info().dataset.file = vectors()


def _seed(worker):
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed())


class KnowsItsWorker(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        info = get_worker_info()
        return *vectors()[index], -1 if info is None else info.num_workers


class Three(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("third", batch[2].float().mean())
        return super().training_step(batch[:2], batch_idx)


def _reads(run):
    return on(on_train_batch_end=lambda *args: run.note(args[-2][0].mean()) if run.batches % 3 == 2 else None)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_contexts_of_workers(compare, context, persistent):
    data = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": persistent}

    def program(run):
        run.fit(
            Classifier(), loader(OpensInWorkers(), worker_init_fn=_open, **data), _reads(run), schedule={2: 2, 10: 0}
        )

    compare(program)


@pytest.mark.parametrize("schedule", [{2: 2}, {2: 2, 14: 0}, {2: 1, 8: 2}])
def test_data_that_open_in_workers(compare, schedule):
    def program(run):
        data = loader(OpensInWorkers(), num_workers=2, worker_init_fn=_open)
        run.fit(Classifier(), data, _reads(run), schedule=schedule, max_epochs=5)

    compare(program)


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"prefetch_factor": 4}, {"worker_init_fn": _seed}])
def test_options_of_workers(compare, options):
    compare(lambda run: run.fit(Classifier(), loader(num_workers=2, **options), _reads(run), max_epochs=4))


def test_sample_knows_its_worker(compare):
    compare(lambda run: run.fit(Three(), loader(KnowsItsWorker(), num_workers=2)), served=None)


# Others who read the loader or the data set.
READERS = {
    "first batch": lambda run, loader: run.note(next(iter(loader))),
    "all batches": lambda run, loader: run.note([x.mean() for x, _ in loader]),
    "one sample": lambda run, loader: run.note(loader.dataset[0]),
    "last sample": lambda run, loader: run.note(loader.dataset[-1]),
    "length": lambda run, loader: run.note((len(loader), len(loader.dataset), loader.batch_size, loader.drop_last)),
    "tensors": lambda run, loader: run.note(loader.dataset.tensors[0].mean()),
    "samples in a loop": lambda run, loader: run.note([x.sum() for x, _ in (loader.dataset[i] for i in range(3))]),
    "collated by hand": lambda run, loader: run.note(loader.collate_fn([loader.dataset[i] for i in (3, 1)])),
    "another loader": lambda run, loader: run.note([x.mean() for x, _ in DataLoader(loader.dataset, 5)]),
    "sampler": lambda run, loader: run.note(
        (type(loader.sampler).__name__, list(loader.sampler), list(loader.batch_sampler))
    ),
    "an iterator is kept": lambda run, loader: run.note(next(iter(loader))) or setattr(run, "kept", iter(loader)),
    "subset": lambda run, loader: run.note(torch.utils.data.Subset(loader.dataset, [4, 2])[1]),
    "isinstance": lambda run, loader: run.note(
        (isinstance(loader, DataLoader), isinstance(loader.dataset, torch.utils.data.TensorDataset))
    ),
}
WHEN = {
    "fit start": "on_train_start",
    "epoch start": "on_train_epoch_start",
    "epoch end": "on_train_epoch_end",
    "batch start": "on_train_batch_start",
    "batch end": "on_train_batch_end",
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("when", WHEN)
@WORKERS
def test_another_reader_of_the_loader(compare, read, when, workers):
    def program(run):
        def look(trainer, module, *_):
            if "batch" not in when or run.batches % 4 == 2:
                read(run, trainer.train_dataloader)

        run.fit(Classifier(), loader(num_workers=workers), on(**{WHEN[when]: look}), max_epochs=4)

    compare(program)


@pytest.mark.parametrize("when", WHEN)
def test_loader_is_made_again(compare, when):
    def program(run):
        def look(trainer, module, *_):
            if "batch" not in when or run.batches % 4 == 2:
                again = trainer.datamodule.train_dataloader()
                run.note((len(again), [x.mean() for x, _ in again]))

        run.fit(Classifier(), data_of(train_dataloader=loader), on(**{WHEN[when]: look}), max_epochs=4)

    compare(program)


@pytest.mark.parametrize("period", [1, 2])
def test_loader_is_made_for_each_epoch(compare, period):
    def program(run):
        made = []

        def make():
            made.append(loader(batch_size=6 if len(made) < 2 else 4))
            return made[-1]

        run.fit(Classifier(), data_of(train_dataloader=make), reload_dataloaders_every_n_epochs=period, max_epochs=5)
        run.note(len(made))

    compare(program)


def test_training_step_with_an_iterator(compare):
    class Iterates(Classifier):
        def training_step(self, dataloader_iter):
            (x, y), _, _ = next(dataloader_iter)
            return self.loss_of(x, y)

    compare(lambda run: run.fit(Iterates()), served=None)
