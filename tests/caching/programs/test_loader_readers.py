"""Callbacks that read the training loader or its data set during a fit, and loaders that are made anew."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from support.caching.parts import WORKERS, Classifier, Samples, data_of, grid, loader, on, vectors

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


@pytest.mark.parametrize(("read", "when"), grid(READERS, list(WHEN), every=13))
@WORKERS
def test_another_reader_of_the_loader(compare, read, when, workers):
    def program(run):
        def look(trainer, module, *_):
            if "batch" not in when or run.batches % 4 == 2:
                read(run, trainer.train_dataloader)

        run.fit(Classifier(), loader(num_workers=workers), on(**{WHEN[when]: look}), max_epochs=4)
        run.kept = None  # an iterator, and its workers

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


def _scaled(factor):
    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return x * factor, y

    return collate


FIXED = vectors()
OUTSIDE = {"scale": 1.0}


def _drifts(data, index):
    return data.x[index] * OUTSIDE["scale"], data.y[index]


# From the number of the loader, the arguments of `loader`; and how often a value is kept: nothing is in the last epoch.
MADE = {
    "same data": (lambda at: (FIXED,), {}, 1),
    "equal data": (lambda at: (vectors(),), {}, 1),
    "data that differ where nobody sees": (lambda at: (Samples(_drifts),), {}, 1),
    "other data": (lambda at: (vectors(seed=at),), {}, 3),
    "other size of batches": (lambda at: (FIXED, 6 + 2 * (at % 2)), {}, 3),
    "equal collate": (lambda at: (FIXED,), {"collate_fn": lambda at: _scaled(2.0)}, 1),
    "other collate": (lambda at: (FIXED,), {"collate_fn": lambda at: _scaled(1.0 + at)}, 3),
    "workers": (lambda at: (FIXED,), {"num_workers": lambda at: 2, "persistent_workers": lambda at: True}, 1),
}


@pytest.mark.parametrize(
    ("arguments", "options", "trials"), [pytest.param(*made, id=name) for name, made in MADE.items()]
)
def test_boundary_is_tried_once_for_loaders_that_are_alike(compare, caplog, arguments, options, trials):
    """A loader is made for each epoch; the first freeze is in the first one."""

    def program(run):
        caplog.clear()
        made = itertools.count()

        def make():
            at = next(made)
            OUTSIDE["scale"] = 1.0 + at // 2
            return loader(*arguments(at), **{name: value(at) for name, value in options.items()})

        data = data_of(train_dataloader=make)
        run.fit(Classifier(), data, reload_dataloaders_every_n_epochs=1, max_epochs=5, schedule={5: 2})

    with caplog.at_level("INFO"):
        compare(program, served=None)
    assert caplog.text.count("will take about") == trials


def test_training_step_with_an_iterator(compare):
    class Iterates(Classifier):
        def training_step(self, dataloader_iter):
            (x, y), _, _ = next(dataloader_iter)
            return self.loss_of(x, y)

    compare(lambda run: run.fit(Iterates()), served=False)
