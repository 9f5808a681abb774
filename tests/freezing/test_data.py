"""Batches and data loaders of every kind."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from support.freezing.setups import Module, Watching, freezing, loader, new
from support.models import ConvNet, equal, fit, left_behind, trainer_of


class Endless(IterableDataset):
    def __init__(self, batches=None):
        self.batches = batches

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for place in itertools.count() if self.batches is None else range(self.batches):
            yield torch.randn(1, 8, 8, generator=generator), place % 3


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (Endless(40), {"max_epochs": 3}),
        (Endless(40), {"max_epochs": -1, "max_steps": 15}),
        (Endless(), {"max_epochs": 1, "limit_train_batches": 15}),
        (Endless(), {"max_epochs": -1, "max_steps": 15}),
    ],
)
def test_iterable_datasets(dataset, arguments):
    module, callback = new(), KnowledgeGuidedFreezing(ScriptedPolicy({3: 1}), background=False)
    fit(module, callback, data=DataLoader(dataset, batch_size=8), **arguments)
    assert callback.frozen_depth == 1


def test_data_that_the_module_makes_when_fitting_starts():
    class MakesData(Module):
        def on_fit_start(self):
            self.data = loader()

        def train_dataloader(self):
            return self.data

    callback = KnowledgeGuidedFreezing(Watching(), background=False)
    trainer_of(callback, epochs=4).fit(new(MakesData))
    assert callback.savings().evaluations_done == 2  # 20 steps, 8 from one to the next


def test_batches_of_any_kind():
    class Batches(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["pair"][0], batch["pair"][1]), batch_idx)

    def collate(samples):
        images, labels = zip(*samples, strict=True)
        return {"pair": (torch.stack(images), torch.tensor(labels)), "names": ["a"] * len(images), "nothing": None}

    data = DataLoader(Endless(40), batch_size=8, collate_fn=collate)
    callback = freezing(Watching())
    fit(new(Batches), callback, data=data)
    assert callback.savings().evaluations_done > 2


class Pair(Sequence):
    """Is not made from a list of what it holds."""

    def __init__(self, first, second):
        self.parts = [first, second]

    def __getitem__(self, index):
        return self.parts[index]

    def __len__(self):
        return 2


class Takes(Module):
    """Its network is given what ``make`` makes of the images."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.net.forward = lambda given: ConvNet.forward(self.net, given[0])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(self.make(batch[0])), batch[1])


@pytest.mark.parametrize("make", [lambda images: (images, range(2)), lambda images: [images, {"a": Pair("b", 1)}]])
def test_arguments_that_cannot_be_made_anew_from_their_parts(make):
    plain, watched, callback = new(Takes, make=make), new(Takes, make=make), freezing(Watching())
    fit(plain)
    fit(watched, callback)
    assert callback.savings().evaluations_done >= 2
    assert equal(plain, watched)


def test_inputs_that_cannot_be_copied_are_told_of():
    def make(images):
        return Pair(images, 1)

    plain, watched, callback = new(Takes, make=make), new(Takes, make=make), freezing(Watching())
    fit(plain)
    with (
        pytest.warns(UserWarning, match="the reference model failed 3 times in a row"),
        pytest.warns(UserWarning, match=r"the reference model failed: TypeError: .*'second'\. Training continues"),
    ):
        fit(watched, callback)
    assert equal(plain, watched)
    assert left_behind(watched) == left_behind(plain)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_batches_that_are_nothing():
    class Counting(Watching):
        steps = ()

        def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
            self.steps = (*self.steps, step)

    def collate(samples):
        return None if samples[0][1] == 1 else torch.utils.data.default_collate(samples)

    plain, watched, callback = new(), new(), freezing(Counting())
    for module, callbacks in ((plain, []), (watched, [callback])):
        fit(module, *callbacks, data=DataLoader(loader().dataset, batch_size=8, collate_fn=collate), epochs=4)
    assert callback.active_policy.steps == tuple(range(1, 17))
    assert callback.savings().evaluations_done > 2
    assert equal(plain, watched)
