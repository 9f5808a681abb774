"""Data sets that change while they are trained on."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from support.caching.parts import (
    CLASSES,
    SAMPLES,
    WORKERS,
    Classifier,
    Samples,
    Stepping,
    Validated,
    at,
    data_of,
    grid,
    loader,
    on,
    vectors,
)

EPOCHS = 5


class Labelled(Dataset):
    """In the manner of torchvision: arrays of data and targets, transforms, an epoch, lists and dictionaries."""

    def __init__(self):
        self.data, self.targets = vectors().tensors
        self.array, self.names = self.data.numpy().copy(), [f"sample {i}" for i in range(SAMPLES)]
        self.samples = [(f"{i}.png", int(y)) for i, y in enumerate(self.targets)]
        self.settings = {"scale": 1.0, "inner": {"shift": 0.0}}
        self.epoch, self.transform, self.offset = 0, None, 0.0

    def __len__(self):
        return SAMPLES

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x = self.data[index] * (1 + 0.2 * self.epoch) * self.settings["scale"] + self.settings["inner"]["shift"]
        x = x + self.offset + torch.from_numpy(self.array[index])
        label = self.targets[index] if self.samples[index][1] == int(vectors().tensors[1][index]) else torch.tensor(0)
        return (x if self.transform is None else self.transform(x)), label


def _set(name, value):
    return lambda dataset, epoch: setattr(dataset, name, value)


def _relabelled(dataset, epoch):
    dataset.targets = (dataset.targets + 1) % CLASSES


# What happens to the data set at the end of an epoch.
CHANGES = {
    "targets in place": lambda d, e: d.targets.copy_((d.targets + 1) % CLASSES),
    "one target in place": lambda d, e: d.targets.__setitem__(7, (int(d.targets[7]) + 1) % CLASSES),
    "targets replaced": _relabelled,
    "targets by data": lambda d, e: d.targets.data.add_(1).remainder_(CLASSES),
    "targets by numpy": lambda d, e: d.targets.numpy().__setitem__(3, 0),
    "inputs in place": lambda d, e: d.data.mul_(1.1),
    "one input in place": lambda d, e: d.data[5].add_(1),
    "array in place": lambda d, e: d.array.__setitem__(11, 0.5),
    "array replaced": lambda d, e: setattr(d, "array", d.array * 2),
    "list of samples": lambda d, e: d.samples.__setitem__(4, ("4.png", 9)),
    "setting": lambda d, e: d.settings.__setitem__("scale", 1.0 + e),
    "inner setting": lambda d, e: d.settings["inner"].__setitem__("shift", 0.5 * e),
    "set_epoch": lambda d, e: d.set_epoch(e),
    "epoch": lambda d, e: setattr(d, "epoch", e),
    "attribute": lambda d, e: setattr(d, "offset", 0.1 * e),
    "transform": lambda d, e: setattr(d, "transform", torch.tanh if e % 2 else torch.sin),
    "transform of a lambda": lambda d, e: setattr(d, "transform", lambda x: x * (1 + e)),
    "method replaced": lambda d, e: setattr(type(d), "scale_of_this_test", e),
    "nothing": lambda d, e: None,
    "unused attribute": lambda d, e: setattr(d, "seen", e),
}
ACCESS = {
    "by its owner": lambda run, trainer, dataset: dataset,
    "by the loader": lambda run, trainer, dataset: trainer.train_dataloader.dataset,
    "by the data module": lambda run, trainer, dataset: trainer.datamodule.train_dataset,
}


@pytest.mark.parametrize(("change", "access"), grid(CHANGES, ACCESS, every=11))
@WORKERS
def test_data_change_between_epochs(compare, change, access, workers):
    """The change comes after epochs 1 and 3, when the cache has served a whole epoch."""

    def program(run):
        dataset = Labelled()
        data = data_of(train_dataloader=lambda: loader(dataset, num_workers=workers))
        data.train_dataset = dataset

        def look(trainer, module):
            if trainer.current_epoch % 2:
                change(access(run, trainer, dataset), trainer.current_epoch)

        run.fit(Classifier(), data, on(on_train_epoch_end=look), max_epochs=EPOCHS)

    compare(program)


LATE = ["targets in place", "inputs in place", "setting", "set_epoch", "transform"]


@pytest.mark.parametrize(
    ("name", "hook"), grid(LATE, ["on_train_epoch_start", "on_train_batch_end", "on_validation_end"], every=4)
)
def test_data_change_in_each_epoch(compare, name, hook):
    def program(run):
        dataset = Labelled()

        def look(trainer, module, *_):
            if hook != "on_train_batch_end" or run.batches % 4 == 3:
                CHANGES[name](dataset, trainer.current_epoch)

        run.fit(
            _Validated(), loader(dataset), on(**{hook: look}), val=loader(dataset, shuffle=False), max_epochs=EPOCHS
        )

    compare(program, served=None)


@pytest.mark.parametrize("name", ["targets in place", "one input in place", "setting", "set_epoch"])
@pytest.mark.parametrize("seconds", [0.003, pytest.param(0.02, marks=pytest.mark.slow)])
def test_data_change_while_entries_are_written(compare, name, seconds):
    """The disk is slow: entries of the old data are still to be written when the data change."""

    def program(run):
        dataset = Labelled()
        change = on(on_train_epoch_end=lambda trainer, module: CHANGES[name](dataset, trainer.current_epoch))
        run.fit(Classifier(), loader(dataset), change, max_epochs=6)

    compare(program, served=None, disk_seconds=seconds)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_data_change_before_the_front_gets_deeper(compare, epoch):
    def program(run):
        dataset = vectors(12, seed=2)

        def change(trainer, module):
            if trainer.current_epoch == epoch:
                dataset.tensors[0].mul_(1.1)

        val, changes = loader(dataset, shuffle=False), on(on_validation_epoch_end=change)
        run.fit(Validated(), None, changes, val=val, schedule={2: 1, 4 * epoch + 5: 2}, max_epochs=EPOCHS + 1)

    compare(program)


@pytest.mark.parametrize("name", ["inputs in place", "one input in place", "setting"])
@pytest.mark.parametrize("again", ["in the step", "in a callback"])
def test_changed_samples_in_two_forwards(compare, name, again):
    """The second forward of a batch must not find what was cached before the change, nor half of it."""

    def program(run):
        dataset = Labelled()

        def step(module, x, y):
            loss = F.cross_entropy(module.net(x), y)
            return loss + 0.1 * module.net(x).square().mean() if again == "in the step" and run.batches else loss

        def look(trainer, module, outputs, batch, batch_idx):
            if again == "in a callback":
                with torch.no_grad():
                    run.note(module.net(batch[0]))

        changes = on(on_train_epoch_end=lambda t, m: CHANGES[name](dataset, t.current_epoch), on_train_batch_end=look)
        run.fit(Stepping(step), loader(dataset), changes, max_epochs=EPOCHS)

    compare(program, served=None)


class _Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss_of(*batch))


def test_pseudo_labels_of_the_network(compare):
    """Labels are replaced by predictions at the end of each epoch, over the loader's own data set."""

    def program(run):
        x, y = vectors().tensors
        dataset = TensorDataset(x, y.clone())

        def label(trainer, module):
            module.eval()
            with torch.no_grad():
                dataset.tensors[1].copy_(module.net(x).argmax(1))
            module.train()

        run.fit(Classifier(), loader(dataset), on(on_train_epoch_end=label), max_epochs=EPOCHS)

    compare(program)


def test_labels_change_in_the_middle_of_an_epoch(compare):
    """A change that the cache cannot see, and is told of."""

    def program(run):
        x, y = vectors().tensors
        dataset = TensorDataset(x, y.clone())

        def change(trainer, module):
            dataset.tensors[1].copy_((dataset.tensors[1] + 1) % CLASSES)
            for cached in run.caches:
                cached.invalidate()

        run.fit(Classifier(), loader(dataset), at(10, change), max_epochs=EPOCHS)

    compare(program)


@pytest.mark.parametrize("ids", [[3, 5], [], range(24)])
def test_some_samples_are_invalidated(compare, ids):
    def program(run):
        dataset = Samples(lambda d, i: (d.x[i] * d.hidden.scale(i), d.y[i]), hidden=_Hidden())

        def change(trainer, module):
            dataset.hidden.changed = set(ids)
            for cached in run.caches:
                cached.invalidate(ids=list(ids))

        run.fit(Classifier(), loader(dataset), at(10, change), max_epochs=EPOCHS)

    compare(program)


class _Hidden:
    changed = frozenset()

    def scale(self, index):
        return 2.0 if index in self.changed else 1.0


# Files.
class Files(Dataset):
    def __init__(self, folder):
        self.folder, self.labels = folder, vectors().tensors[1]
        folder.mkdir()
        for index, row in enumerate((vectors().tensors[0] * 30 + 128).byte()):
            self.write(index, row)

    def write(self, index, row):
        Image.fromarray(row.view(2, 4).numpy()).save(self.folder / f"{index}.png")

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        with Image.open(self.folder / f"{index}.png") as image:
            return torch.from_numpy(np.array(image)).flatten() / 255, self.labels[index]


def test_images_are_read_from_files(compare):
    compare(lambda run: run.fit(Classifier(), loader(Files(run.folder / "images"))))


def test_file_is_rewritten_between_two_fits(compare):
    """The second run has the same frozen weights and finds the entries of the first."""

    def program(run):
        dataset = Files(run.folder / "images")
        start = torch.nn.init.eye_
        for _ in range(2):
            torch.manual_seed(0)
            module = Classifier()
            start(module.net.a[0].weight)
            # Frozen after a step with a learning rate of 0: both fits have the same front.
            warm_up = on(on_train_batch_start=lambda t, m, *_: _set_rate(t, 0.0 if t.global_step < 2 else 0.05))
            run.fit(module, loader(dataset), warm_up)
            dataset.write(9, torch.zeros(8, dtype=torch.uint8))
            dataset.write(10, torch.full((8,), 200, dtype=torch.uint8))

    compare(program)


def _set_rate(trainer, rate):
    trainer.optimizers[0].param_groups[0]["lr"] = rate


@WORKERS
@pytest.mark.parametrize("between", ["epochs", "batches"])
def test_a_dataset_grows(compare, between, workers):
    def program(run):
        data = Subset(vectors(), list(range(12)))

        def grow(trainer, module, *_):
            if trainer.global_step in (4, 9):
                data.indices.extend(range(len(data), len(data) + 6))

        grows = on(on_train_epoch_end=grow) if between == "epochs" else on(on_train_batch_end=grow)
        run.fit(Validated(), loader(data, num_workers=workers), grows, val=loader(data, shuffle=False), max_epochs=8)

    compare(program)


@pytest.mark.parametrize("read", ["in the next epoch", "at the end of its epoch"])
def test_a_batch_is_kept_and_the_dataset_changes(compare, read):
    """It holds what it was trained on."""

    def program(run):
        data, kept = Samples(lambda data, index: (data.x[index] * data.task, data.y[index]), task=1), []

        def keep(trainer, module, outputs, batch, index):
            kept.append(batch)
            del kept[:-2]

        def switch(trainer, module):
            data.task = 2 if trainer.current_epoch >= 3 else 1
            if read == "at the end of its epoch":
                run.note([x.sum() for x, _ in kept])

        def replay(module, x, y):
            loss = F.cross_entropy(module.net(x), y)
            if data.task == 2 and read == "in the next epoch":
                old, labels = kept[0]
                loss = loss + F.cross_entropy(module.net(old), labels)
            return loss

        run.fit(Stepping(replay), loader(data), on(on_train_batch_end=keep, on_train_epoch_end=switch), max_epochs=6)

    compare(program)
