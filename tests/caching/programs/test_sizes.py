"""Samples of several sizes, and validation behind what trains."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.caching.parts import CLASSES, SAMPLES, Samples, Stepping, Validated, loader, on

WIDTH = 6
SIZES = {
    "all differ": lambda index: 3 + 5 * index % 17,
    "two": lambda index: 4 + 4 * (index % 2),
    "nearly all the same": lambda index: 9 - 4 * (index % 12 == 0),
}


class Pooled(nn.Module):
    """Frozen convolutions over time, a trained adapter between them, and the mean."""

    def __init__(self, adapts=False):
        super().__init__()
        self.first, self.second = nn.Conv1d(WIDTH, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)
        self.adapter = nn.Conv1d(8, 8, 1) if adapts else None
        self.head = nn.Linear(8, CLASSES)
        for part in (self.first, self.second):
            part.requires_grad_(False)

    def forward(self, x):
        x = self.first(x).relu()
        x = self.second(x + self.adapter(x) if self.adapter is not None else x)
        return self.head(x.mean(-1))


class Sequences(Samples):
    """Sequences whose length follows from their number."""

    def __init__(self, length, samples=SAMPLES):
        super().__init__(self.sequence, samples)
        self.length = length

    @staticmethod
    def sequence(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, self.length(index), generator=generator), index % CLASSES


def padded(samples):
    """Each batch is as long as its longest sequence."""
    longest = max(x.shape[-1] for x, _ in samples)
    x = torch.stack([F.pad(x, (0, longest - x.shape[-1])) for x, _ in samples])
    return x, torch.tensor([y for _, y in samples])


def padded_at_once(samples):
    x, y = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence([one.T for one in x], batch_first=True).transpose(1, 2), torch.tensor(y)


@pytest.mark.parametrize("collate", [padded, padded_at_once])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("adapts", [False, True])
def test_padded_batches_in_training_and_validation(compare, collate, sizes, adapts):
    data = Sequences(SIZES[sizes])

    def program(run):
        val = loader(data, shuffle=False, collate_fn=collate)
        run.fit(Validated(Pooled(adapts)), loader(data, collate_fn=collate), val=val, max_epochs=5, schedule={})

    compare(program, served=None, freezes=False)


@pytest.mark.parametrize("sizes", SIZES)
def test_samples_of_their_own_size_one_by_one(compare, sizes):
    data = Sequences(SIZES[sizes])
    run = compare(
        lambda run: run.fit(Validated(Pooled()), loader(data, batch_size=1), max_epochs=4, schedule={}),
        served=None,
        freezes=False,
    )
    assert run.caches[-1].stats.hits > SAMPLES


def test_sizes_change_between_epochs(compare):
    """Progressive resizing in the dataset."""

    def program(run):
        data = Sequences(lambda index: 5)

        def resize(trainer, module):
            data.length = lambda index: 5 + 2 * (trainer.current_epoch // 3)

        run.fit(
            Validated(Pooled()),
            loader(data),
            on(on_train_epoch_start=resize),
            max_epochs=7,
            schedule={},
            reload_dataloaders_every_n_epochs=1,
        )

    compare(program, served=None, freezes=False)


def test_two_crops_of_each_sample(compare):
    """The same frozen encoder on two sizes in each step, the second one in some steps only."""

    def step(module, x, y):
        whole = module.net(x)
        return F.cross_entropy(whole + module.net(x[..., :4]) if module.global_step % 3 else whole, y)

    data = Sequences(lambda index: 9)
    run = compare(lambda run: run.fit(Stepping(step, Pooled()), loader(data), max_epochs=5, schedule={}), freezes=False)
    assert run.caches[-1].stats.off is None


class Shared(Pooled):
    """The second encoder sees what is frozen, and what the adapter makes of it."""

    def forward(self, x):
        x = self.first(x).relu()
        return self.head(self.second(x).mean(-1) + self.second(x + self.adapter(x)).mean(-1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_frozen_module_in_front_of_what_trains_and_behind_it(compare, mode):
    def program(run):
        data = Sequences(lambda index: 9)
        run.fit(
            Validated(Shared(adapts=True)),
            loader(data),
            val=loader(data, shuffle=False),
            max_epochs=5,
            schedule={},
            inference_mode=mode is torch.inference_mode,
        )

    compare(program, freezes=False)


def test_the_adapter_freezes_during_the_run(compare):
    """From then on, what is behind it is served, in validation too."""

    class Freezing(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            module.net.adapter.requires_grad_(trainer.current_epoch not in (2, 3))

    def program(run):
        data = Sequences(lambda index: 9)
        run.fit(
            Validated(Pooled(adapts=True)),
            loader(data),
            Freezing(),
            val=loader(data, shuffle=False),
            max_epochs=7,
            schedule={},
        )

    compare(program, freezes=False)


def test_an_output_that_requires_a_gradient_for_nothing(compare):
    """PEFT has embeddings require one, so that checkpointing works."""

    class Requiring(Pooled):
        def __init__(self):
            super().__init__()
            self.first.register_forward_hook(lambda module, args, output: output.requires_grad_())
            self.third = nn.Conv1d(8, 8, 3, padding=1)
            for part in (self.first, self.second):
                part.requires_grad_(True)

        def forward(self, x):
            return self.head(self.third(self.second(self.first(x).relu()).relu()).mean(-1))

    compare(lambda run: run.fit(Validated(Requiring()), loader(Sequences(lambda index: 9)), max_epochs=5))
