"""What stands between the data loader and the frozen front: casts, views, normalisation, mixing, crops, hooks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.caching.parts import (
    CLASSES,
    Classifier,
    ConvNet,
    Samples,
    Stepping,
    Validated,
    data_of,
    grid,
    images,
    loader,
)

MEAN, STD = torch.tensor(0.1), torch.tensor(0.7)


def _mixup(x):
    """With a weight per batch."""
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return torch.lerp(x, x[torch.randperm(len(x))], share)


def _cutmix(x):
    x, other = x.clone(), x.flip(0)
    left = int(torch.randint(0, 4, ()))
    x[:, :, left : left + 2] = other[:, :, left : left + 2]
    return x


def _crops(x):
    top, left = torch.randint(0, 3, (2,)).tolist()
    return x[:, :, top : top + 4, left : left + 4]


# Between the loader and the network, in the step. Images of 1x6x6.
SAME_FOR_A_SAMPLE = {
    "to": lambda x: x.to("cpu"),
    "float": lambda x: x.float(),
    "double and back": lambda x: x.double().float(),
    "half and back": lambda x: x.half().float(),
    "bfloat16 and back": lambda x: x.to(torch.bfloat16).float(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "contiguous channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "view": lambda x: x.view(x.shape),
    "view there and back": lambda x: x.view(len(x), -1).view(x.shape),
    "flatten there and back": lambda x: x.flatten(1).unflatten(1, (1, 6, 6)),
    "reshape": lambda x: x.reshape(x.size(0), 1, 6, 6),
    "permuted there and back": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "squeezed there and back": lambda x: x.squeeze(1).unsqueeze(1),
    "crop": lambda x: x[:, :, 1:5, 1:5],
    "crop of some rows": lambda x: x[:, :, 2:],
    "strided": lambda x: x[..., ::2],
    "all of it": lambda x: x[:],
    "Ellipsis": lambda x: x[...],
    "flip": lambda x: x.flip(-1),
    "transposed": lambda x: x.mT,
    "narrow": lambda x: x.narrow(2, 0, 4),
    "select and unsqueeze": lambda x: x[:, 0][:, None],
    "expanded": lambda x: x[:, :1].expand(-1, 1, -1, -1),
    "padded": lambda x: F.pad(x, (1, 1)),
    "normalised": lambda x: (x - MEAN) / STD,
    "normalised in place": lambda x: x.sub_(MEAN).div_(STD),
    "normalised per sample": lambda x: x - x.mean((1, 2, 3), keepdim=True),
    "scaled": lambda x: x * 2,
    "resized": lambda x: F.interpolate(x, size=4),
    "integers": lambda x: (x * 10).round(),
    "abs": lambda x: x.abs_(),
    "no grad": lambda x: torch.no_grad()(torch.sin)(x),
    "pinned": lambda x: x.pin_memory() if torch.cuda.is_available() else x,
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "stacked again": lambda x: torch.stack(list(x)),
    "cat of halves": lambda x: torch.cat(x.chunk(2)),
    "rows in a loop": lambda x: torch.stack(tuple(x.unbind())),
    "numpy there and back": lambda x: torch.from_numpy(x.numpy().copy()),
    "to a list and back": lambda x: torch.tensor(x.tolist()),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "data": lambda x: x.data,
    "requires_grad": lambda x: x.requires_grad_(False),
    "where": lambda x: torch.where(x > 0, x, -x),
}
# The network's input is no function of the sample.
DRAWN = {
    "mixup": _mixup,
    "cutmix": _cutmix,
    "crop": _crops,
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "noise in place": lambda x: x.add_(torch.randn_like(x), alpha=0.1),
    "mirrored": lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x,
    "mirrored per sample": lambda x: torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x),
    "erased": lambda x: x * (torch.rand_like(x) > 0.1),
    "dropout": lambda x: F.dropout(x, 0.2),
    "permuted pixels": lambda x: x[..., torch.randperm(6)],
    "order of rows": lambda x: x.roll(1, 0),
    "batch mean": lambda x: x - x.mean(0),
}


def _fit_with(run, change, when=lambda run: True, **options):
    def step(module, x, y):
        return F.cross_entropy(module.net(change(x) if when(run) else x), y)

    run.fit(Stepping(step, ConvNet()), loader(images()), **options)


@pytest.mark.parametrize("change", grid(SAME_FOR_A_SAMPLE, every=7))
def test_same_change_of_each_batch(compare, change):
    compare(lambda run: _fit_with(run, change))


@pytest.mark.parametrize("change", grid(DRAWN, every=7))
def test_drawn_change_of_each_batch(compare, change):
    compare(lambda run: _fit_with(run, change), served=None)


@pytest.mark.parametrize(("change", "seed"), grid(DRAWN | SAME_FOR_A_SAMPLE, range(4), every=37))
def test_change_of_some_batches(compare, change, seed):
    """MixUp with a probability: whether it happens is drawn in each step."""
    compare(lambda run: _fit_with(run, change, lambda run: bool(torch.rand(()) < 0.3)), served=None, seed=seed)


@pytest.mark.parametrize("change", grid(DRAWN, every=7))
def test_change_that_begins_late(compare, change):
    compare(lambda run: _fit_with(run, change, lambda run: run.batches >= 9))


@pytest.mark.parametrize("change", grid(DRAWN, every=7))
def test_change_that_ends_early(compare, change):
    compare(lambda run: _fit_with(run, change, lambda run: run.batches < 6, max_epochs=4), served=None)


# Of the rows of a batch. The labels follow.
ROWS = {
    "all but the first": lambda part: part[1:],
    "half": lambda part: part[: len(part) // 2],
    "doubled": lambda part: torch.cat([part, part]),
    "in reverse": lambda part: part.flip(0),
    "one again": lambda part: torch.cat([part, part[:1]]),
    "by index": lambda part: part[torch.tensor([2, 0, 1])],
}


@pytest.mark.parametrize(("rows", "kind", "period"), grid(ROWS, ["tensor", "numpy"], [1, 3], every=5))
def test_network_gets_other_rows(compare, rows, kind, period):
    def program(run):
        def step(module, x, y):
            if run.batches % period == 0:
                x, y = rows(x), rows(y)
            return F.cross_entropy(module.net(x), y)

        dataset = Samples(lambda d, i: (d.x[i].numpy() if kind == "numpy" else d.x[i], d.y[i]))
        run.fit(Stepping(step), loader(dataset), max_epochs=4)

    compare(program, served=None)


def test_mixed_labels_beside_mixed_inputs(compare):
    def step(module, x, y):
        share, order = torch.rand(()), torch.randperm(len(x))
        labels = F.one_hot(y, CLASSES).float()
        return F.cross_entropy(module.net(torch.lerp(x, x[order], share)), torch.lerp(labels, labels[order], share))

    compare(lambda run: run.fit(Stepping(step)), served=None)


def test_input_grows_over_time(compare):
    """Progressive resizing: other shapes at one boundary."""
    sizes = {0: 4, 1: 5, 2: 6, 3: 6}

    def program(run):
        def step(module, x, y):
            return F.cross_entropy(module.net(F.interpolate(x, size=sizes[module.current_epoch])), y)

        run.fit(Stepping(step, ConvNet()), loader(images()), max_epochs=4)

    compare(program, served=None)


def test_scale_changes_by_epoch(compare):
    compare(
        lambda run: run.fit(
            Stepping(lambda m, x, y: F.cross_entropy(m.net(x * (1 + m.current_epoch)), y)),
            schedule={2: 2},
            max_epochs=4,
        ),
        served=None,
    )


# Hooks that Lightning calls on a batch before the step.
TRANSFER_HOOKS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
BATCH_CHANGES = {
    "nothing": lambda x: x,
    "normalised": lambda x: (x - MEAN) / STD,
    "read": lambda x: (x.mean(), x)[1],
    "cast": lambda x: x.double().float(),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "in place": lambda x: x.mul_(2),
    "mixup now and then": lambda x: _mixup(x) if torch.rand(()) < 0.3 else x,
    "rows swapped": lambda x: x.flip(0),
}


@pytest.mark.parametrize(("change", "hook", "owner"), grid(BATCH_CHANGES, TRANSFER_HOOKS, ["module", "data"], every=11))
def test_transfer_hooks(compare, change, hook, owner):
    def changed(batch, *_):
        return [change(batch[0]), batch[1]]

    def program(run):
        if owner == "data":
            run.fit(Classifier(), data_of(train_dataloader=loader, **{hook: changed}))
            return
        module = type("Hooked", (Classifier,), {hook: lambda self, batch, *_: changed(batch)})()
        run.fit(module)

    compare(program, served=None)


def test_transfer_hooks_of_training_only(compare):
    class Hooked(Validated):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 2, batch[1]] if self.trainer.training else batch

    compare(lambda run: run.fit(Hooked(), val=loader(shuffle=False)))


def test_transfer_hooks_that_come_late(compare):
    class Hooked(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 2, batch[1]] if self.trainer.global_step > 8 else batch

    compare(lambda run: run.fit(Hooked()))


class Unpacks(Classifier):
    """Batches of other kinds, made in a hook."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.kind(batch)

    def training_step(self, batch, batch_idx):
        x, y = batch.values() if isinstance(batch, dict) else batch
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize(
    "kind", [tuple, lambda batch: {"x": batch[0], "y": batch[1]}, lambda batch: [batch[0], batch[1] * 1]]
)
def test_batch_is_of_another_kind(compare, kind):
    compare(lambda run: run.fit(Unpacks(kind)))


@pytest.mark.parametrize(("precision", "width"), grid(["bf16-mixed", "bf16-true", "64-true"], [4, 8], every=4))
def test_precision(compare, precision, width):
    def program(run):
        run.fit(
            Validated(ConvNet(width=width)), loader(images()), val=loader(images(), shuffle=False), precision=precision
        )

    compare(program)


def test_normalisation_over_the_batch_in_the_front(compare):
    """Rows that depend on batch mates have no entry, in any precision."""

    def program(run):
        net = ConvNet()
        net.a[1] = nn.BatchNorm2d(4, track_running_stats=False)
        run.fit(Classifier(net), loader(images()), precision="bf16-mixed")

    compare(program, served=False)


def test_normalisation_over_the_batch_in_float32(compare):
    def program(run):
        net = ConvNet()
        net.b[1] = nn.BatchNorm2d(4, track_running_stats=False)
        run.fit(Classifier(net), loader(images()))

    compare(program, served=None)
