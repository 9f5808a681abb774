"""Small networks, modules, data and callbacks that programs are made of."""

import itertools

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES, WIDTH, CLASSES, BATCH = 24, 8, 3, 6
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])


def grid(*tables, every=1):
    """Parameters of a test: all combinations of the tables' values, of which one in ``every`` is not slow.

    A table is a dictionary from names, or a list.
    """
    rows = [
        table.items()
        if isinstance(table, dict)
        else [(getattr(value, "__name__", str(value)), value) for value in table]
        for table in tables
    ]
    return [
        pytest.param(
            *(value for _, value in row),
            id="-".join(name for name, _ in row),
            marks=[pytest.mark.slow] if place % every else [],
        )
        for place, row in enumerate(itertools.product(*rows))
    ]


class Net(nn.Module):
    """Three layer modules and a head. The front has weights, running statistics and no dropout."""

    def __init__(self, width=WIDTH, classes=CLASSES, dropout=0.0):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(dropout))
        self.b = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
        self.c = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.c(self.b(self.a(x))))


class ConvNet(nn.Module):
    """The same for images."""

    def __init__(self, channels=1, width=4, classes=CLASSES):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.c = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.2), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.c(self.b(self.a(x))).mean((2, 3)))


def block(*parts):
    return nn.Sequential(*parts)


class Chain(nn.Module):
    """``a``, ``b``, ``c`` and a head, called one after the other by ``calls``."""

    def __init__(self, a=None, b=None, c=None, head=None, call=None):
        super().__init__()
        self.a = a or block(nn.Linear(8, 8), nn.ReLU())
        self.b = b or block(nn.Linear(8, 8), nn.ReLU())
        self.c = c or block(nn.Linear(8, 8), nn.ReLU())
        self.head, self.call = head or nn.Linear(8, CLASSES), call

    def forward(self, x):
        if self.call is not None:
            return self.call(self, x)
        return self.head(self.c(self.b(self.a(x))))


class Classifier(L.LightningModule):
    """Cross-entropy of ``net``. A subclass overrides `loss_of` or any hook."""

    def __init__(self, net=None):
        super().__init__()
        self.net = Net() if net is None else net

    def loss_of(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss_of(x, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Stepping(Classifier):
    """Trains with ``step(module, x, y)``, which returns the loss."""

    def __init__(self, step, net=None):
        super().__init__(net)
        self.step = step

    def loss_of(self, x, y):
        return self.step(self, x, y)


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))


def vectors(samples=SAMPLES, width=WIDTH, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, width, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def images(samples=SAMPLES, channels=1, size=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, channels, size, size, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def loader(dataset=None, batch_size=BATCH, shuffle=True, **options):
    """A DataLoader of ``dataset``, by default `vectors`."""
    dataset = vectors() if dataset is None else dataset
    if options.keys() & {"sampler", "batch_sampler"} or isinstance(dataset, torch.utils.data.IterableDataset):
        shuffle = None
    if "batch_sampler" in options:
        return DataLoader(dataset, **options)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, **options)


class Samples(Dataset):
    """A map-style dataset from a function of the index; ``state`` becomes its attributes."""

    def __init__(self, sample, samples=SAMPLES, **state):
        self.sample, self.samples = sample, samples
        self.x, self.y = vectors(samples).tensors
        vars(self).update(state)

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.sample(self, index)


def data_of(base=L.LightningDataModule, **hooks):
    """A data module, or another ``base``, from functions by names of hooks: ``data_of(train_dataloader=loader)``."""
    return type(base.__name__, (base,), {name: _hook(function) for name, function in hooks.items()})()


def on(**hooks):
    """A callback from functions: ``on(on_train_start=lambda trainer, module: ...)``."""
    return data_of(L.Callback, **hooks)


def _hook(function):
    return lambda self, *args: function(*args)


def at(step, look):
    """A callback that calls ``look(trainer, module)`` after the optimizer step ``step``, between two batches."""

    def after(trainer, module, *_):
        if trainer.global_step == step:
            look(trainer, module)

    return on(on_train_batch_end=after)
