"""Worker processes of the training loader."""

import functools
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    get_worker_info,
)

from support.caching.parts import BATCH, SAMPLES, Classifier, grid, loader, on, vectors


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


@pytest.mark.parametrize("schedule", grid([{2: 2, 14: 0}, {2: 2}, {2: 1, 8: 2}], every=7))
def test_data_that_open_in_workers(compare, schedule):
    def program(run):
        data = loader(OpensInWorkers(), num_workers=2, worker_init_fn=_open)
        run.fit(Classifier(), data, _reads(run), schedule=schedule, max_epochs=5)

    compare(program)


OPTIONS = {
    "persistent": {"persistent_workers": True},
    "prefetched": {"prefetch_factor": 4},
    "initialised": {"worker_init_fn": _seed},
}


@pytest.mark.parametrize("options", grid(OPTIONS, every=3))
def test_options_of_workers(compare, options):
    compare(lambda run: run.fit(Classifier(), loader(num_workers=2, **options), _reads(run), max_epochs=4))


def test_sample_knows_its_worker(compare):
    compare(lambda run: run.fit(Three(), loader(KnowsItsWorker(), num_workers=2)), served=None)


class Items(Dataset):
    def __init__(self):
        self.items = [vectors()[index] for index in range(SAMPLES)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def _shrinks(data):
    del data.items[SAMPLES // 2 :]


def _doubles(data):
    data.items = [(2 * x, y) for x, y in data.items]


@pytest.mark.parametrize(
    ("change", "persistent"),
    [
        (_shrinks, False),
        (_doubles, True),
        pytest.param(_shrinks, True, marks=pytest.mark.slow),
        pytest.param(_doubles, False, marks=pytest.mark.slow),
    ],
)
def test_data_that_change_while_workers_load(compare, change, persistent):
    def program(run):
        data = Items()
        changes = on(on_train_batch_end=lambda *args: change(data) if run.batches == 13 else None)
        workers = loader(data, num_workers=2, persistent_workers=persistent)
        run.fit(Classifier(), workers, _reads(run), changes, max_epochs=5)

    compare(program)


class OfItsWorker(Dataset):
    """Samples are those of the worker that loads them, which is set up once."""

    offset = None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        assert get_worker_info().num_workers == 2
        x, y = vectors()[index]
        return x + self.offset + random.Random(get_worker_info().seed + index).gauss(0, self.noise), y


def _set_up(noise, worker):
    data = get_worker_info().dataset
    assert data.offset is None
    data.offset, data.noise = torch.randn(1), noise


@pytest.mark.parametrize(
    ("noise", "persistent"),
    [
        (0, True),
        (0.1, False),
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(0.1, True, marks=pytest.mark.slow),
    ],
)
def test_samples_of_their_worker(compare, noise, persistent):
    def program(run):
        start = functools.partial(_set_up, noise)
        data = loader(OfItsWorker(), num_workers=2, persistent_workers=persistent, worker_init_fn=start)
        run.fit(Classifier(), data, _reads(run), max_epochs=5)

    compare(program, served=None)


@pytest.mark.slow
def test_a_child_process_reads_the_batch(compare):
    def program(run):
        def read(trainer, module, outputs, batch, number):
            if run.batches % 3 == 2:
                child = multiprocessing.get_context("fork").Process(target=lambda: batch[0].sum())
                child.start()
                child.join()
                run.note(torch.tensor(child.exitcode))

        run.fit(Classifier(), loader(num_workers=2), on(on_train_batch_end=read), max_epochs=4)

    compare(program)


class Relabels(torch.utils.data.Sampler):
    """Changes the dataset as an epoch begins, when workers have their copies already."""

    def __init__(self, dataset, changes):
        self.dataset, self.changes = dataset, changes

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        change = next(self.changes, None)
        if change is not None:
            self.dataset.tensors[0][change] += 1
        yield from torch.randperm(len(self.dataset)).tolist()


@pytest.mark.parametrize("changes", [(None, None, 3, 5), pytest.param((1, 2, 3, 4), marks=pytest.mark.slow)])
def test_the_sampler_changes_the_data(compare, changes):
    def program(run):
        dataset = vectors()
        data = DataLoader(dataset, BATCH, sampler=Relabels(dataset, iter(changes)), num_workers=1)
        run.fit(Classifier(), data, max_epochs=7)

    compare(program)
