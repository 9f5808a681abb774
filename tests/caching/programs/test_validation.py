"""Validation beside a cached training."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from support.caching.parts import (
    Classifier,
    ConvNet,
    Net,
    Samples,
    Validated,
    data_of,
    grid,
    images,
    loader,
    on,
    vectors,
)


class Validates(Classifier):
    """``step(module, x, y)`` is the validation step."""

    def __init__(self, step, net=None):
        super().__init__(net)
        self.step = step

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.step(self, *batch)


def _loss(module, x, y):
    module.log("val", F.cross_entropy(module.net(x), y))


def _also(read):
    def step(module, x, y):
        module.log("read", read(module, x))
        _loss(module, x, y)

    return step


STEPS = {
    "loss": _loss,
    "reads the input": _also(lambda module, x: x.mean()),
    "augments": _also(lambda module, x: module.net(x + torch.randn_like(x)).mean()),
    "flips": _also(lambda module, x: (module.net(x) + module.net(x.flip(1))).mean()),
    "features": _also(lambda module, x: module.net.b(module.net.a(x)).norm()),
    "dropout": _also(lambda module, x: (module.net.train()(x).mean(), module.net.eval())[0]),
    "gradient": _also(lambda module, x: _input_gradient(module, x)),
    "in place": _also(lambda module, x: x.mul_(2).mean()),
    "copy of the network": _also(lambda module, x: copy.deepcopy(module.net)(x).mean()),
    "other weights": _also(lambda module, x: _with_other_weights(module, x)),
    "numpy": _also(lambda module, x: float(x.numpy().sum())),
    "no network": lambda module, x, y: module.log("val", x.mean()),
    "draws": _also(lambda module, x: torch.rand(())),
}


def _input_gradient(module, x):
    with torch.inference_mode(False), torch.enable_grad():
        z = x.clone().requires_grad_(True)
        return torch.autograd.grad(module.net(z).sum(), z)[0].norm()


def _with_other_weights(module, x):
    with torch.no_grad():
        module.net.a[0].weight.mul_(2)
        value = module.net(x).mean()
        module.net.a[0].weight.div_(2)
    return value


@pytest.mark.parametrize(
    ("step", "options"), grid(STEPS, [{}, {"val_check_interval": 2}, {"inference_mode": False}], every=4)
)
def test_validation_step(compare, step, options):
    compare(lambda run: run.fit(Validates(step), val=loader(vectors(seed=2), shuffle=False), max_epochs=5, **options))


LOADERS = {
    "shuffled": lambda: loader(vectors(seed=2)),
    "the training data": loader,
    "other batch size": lambda: loader(vectors(20, seed=2), batch_size=7, shuffle=False),
    "several": lambda: [loader(vectors(seed=2), shuffle=False), loader(vectors(10, seed=3), shuffle=False)],
    "several of one data set": lambda: [
        loader(d := vectors(seed=2), shuffle=False),
        loader(d, batch_size=4, shuffle=False),
    ],
    "none": list,
    "stream": lambda: loader(_Stream()),
    "random": lambda: loader(Samples(lambda d, i: (d.x[i] + torch.rand(()), d.y[i])), shuffle=False),
    "random now and then": lambda: loader(
        Samples(lambda d, i: (d.x[i] + (torch.rand(()) if i == 7 else 0), d.y[i])), shuffle=False
    ),
    "counts": lambda: loader(_Counting(), shuffle=False),
    "labels that change": lambda: loader(_Relabelled(), shuffle=False),
    "workers": lambda: loader(vectors(seed=2), shuffle=False, num_workers=1),
    "persistent workers": lambda: loader(vectors(seed=2), shuffle=False, num_workers=1, persistent_workers=True),
    "texts as ids": lambda: loader(_Keyed(), batch_sampler=[["a", "b", "c"], ["d", "e"]]),
    "longer than training": lambda: loader(vectors(60, seed=2), shuffle=False),
}


class _Stream(IterableDataset):
    def __iter__(self):
        yield from vectors(seed=2)


class _Counting(Samples):
    def __init__(self):
        super().__init__(self.count, calls=0)

    @staticmethod
    def count(self, index):
        self.calls += 1
        return self.x[index] + self.calls, self.y[index]


class _Relabelled(Samples):
    """Labels change by the epoch that somebody sets."""

    def __init__(self):
        super().__init__(lambda d, i: (d.x[i], (d.y[i] + d.epoch) % 3), epoch=0)


class _Keyed(Samples):
    def __init__(self):
        super().__init__(lambda d, key: (d.x[ord(key) - 97], d.y[ord(key) - 97]))


@pytest.mark.parametrize(("make", "kind"), grid(LOADERS, ["loader", "data module"], every=7))
def test_validation_loader(compare, make, kind):
    def next_epoch(trainer, module):
        for one in trainer.val_dataloaders if isinstance(trainer.val_dataloaders, list) else [trainer.val_dataloaders]:
            if one is not None and hasattr(one.dataset, "epoch"):
                one.dataset.epoch += 1

    def program(run):
        val = make()
        after = on(on_train_epoch_end=next_epoch)
        if kind == "loader":
            run.fit(Validates(_loss), None, after, val=val, max_epochs=5)
        else:
            run.fit(Validates(_loss), data_of(train_dataloader=loader, val_dataloader=lambda: val), after, max_epochs=5)

    compare(program)


HOOKS = {
    "reads": lambda run: {"on_validation_batch_end": lambda t, m, o, batch, *_: run.note(batch[0].mean())},
    "keeps": lambda run: {"on_validation_batch_end": lambda t, m, o, batch, *_: run.kept.append(batch)},
    "changes": lambda run: {"on_validation_batch_start": lambda t, m, batch, *_: batch[0].add_(1)},
    "reads the loader": lambda run: {
        "on_validation_epoch_start": lambda t, m: run.note([x.mean() for x, _ in t.val_dataloaders])
    },
    "reads the data set": lambda run: {"on_validation_epoch_end": lambda t, m: run.note(t.val_dataloaders.dataset[3])},
    "moves weights": lambda run: {
        "on_validation_start": lambda t, m: m.net.a[0].weight.data.mul_(2),
        "on_validation_end": lambda t, m: m.net.a[0].weight.data.div_(2),
    },
    "moves statistics": lambda run: {
        "on_validation_start": lambda t, m: m.net.a[1].running_mean.mul_(2),
        "on_validation_end": lambda t, m: m.net.a[1].running_mean.div_(2),
    },
    "runs the network": lambda run: {
        "on_validation_epoch_end": lambda t, m: run.note(m.net(torch.ones(2, 8)).detach().clone())
    },
}


@pytest.mark.parametrize("hooks", grid(HOOKS, every=4))
def test_hooks_of_validation(compare, hooks):
    def program(run):
        run.kept = []
        run.fit(Validates(_loss), None, on(**hooks(run)), val=loader(vectors(seed=2), shuffle=False), max_epochs=5)
        run.note(run.kept)

    compare(program)


DEPTHS = [{2: 1, 6: 2}, {2: 2, 9: 0}, {2: 2, 9: 0, 13: 2}, {1: 1, 5: 2, 17: 1}]


@pytest.mark.parametrize(("schedule", "net"), grid(DEPTHS, [Net, ConvNet], every=3))
def test_validation_while_the_depth_changes(compare, schedule, net):
    def program(run):
        make = images if net is ConvNet else vectors
        val = loader(make(seed=2), shuffle=False)
        run.fit(Validated(net()), loader(make()), val=val, schedule=schedule, max_epochs=6, val_check_interval=2)

    compare(program)


def test_sanity_check_comes_before_the_freeze(compare):
    compare(lambda run: run.fit(Validated(), val=loader(shuffle=False), num_sanity_val_steps=-1, max_epochs=4))


def test_validation_with_dropout_in_the_front(compare):
    compare(lambda run: run.fit(Validated(Net(dropout=0.3)), val=loader(shuffle=False), max_epochs=4))


def test_validation_in_lower_precision(compare):
    def program(run):
        val = loader(images(seed=2), shuffle=False)
        run.fit(Validated(ConvNet()), loader(images()), val=val, precision="bf16-mixed", max_epochs=5)

    compare(program)


class Evaluates(Validated):
    """A second network that only validation reads."""

    def __init__(self):
        super().__init__()
        self.judge = nn.Linear(8, 3)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("judged", self.judge(batch[0]).mean())


def test_another_network_reads_validation(compare):
    compare(lambda run: run.fit(Evaluates(), val=loader(vectors(seed=2), shuffle=False), max_epochs=5))


def test_validation_is_served(compare):
    """The statistics show what validation saved."""
    run = compare(lambda run: run.fit(Validated(), val=loader(vectors(48, seed=2), shuffle=False), max_epochs=6))
    assert run.caches[0].validation_stats.hits > 3 * 48


@pytest.mark.parametrize("batches", [1, 3])
def test_all_batches_of_validation_are_counted(compare, batches):
    def program(run):
        run.validated = 0

        def count(trainer, module, outputs, batch, *_):
            run.validated += len(batch[1]) if trainer.global_step > 2 else 0

        data = loader(vectors(24), batch_size=24 // batches, shuffle=False)
        run.fit(Validated(), None, on(on_validation_batch_end=count), val=data, max_epochs=4)

    run = compare(program)
    stats = run.caches[0].validation_stats
    # The first batches are planned before the model is in evaluation mode.
    assert run.validated - 24 <= stats.hits + stats.advanced + stats.misses <= run.validated
