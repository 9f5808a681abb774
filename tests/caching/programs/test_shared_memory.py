"""Tensors of a batch, and outputs of a layer, that share memory: a change of one in place shows in the other."""

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from support.caching.parts import WORKERS, Chain, Classifier, loader


def _twice(x):
    return x, x


def _view(x):
    return x, x[:, :3]


def _view_first(x):
    return x[:, :3], x


def _view_of_a_view(x):
    half = x[:, 2:]
    return half, half[:, :3]


def _parts(x):
    return x, x.chunk(2, 1)[0]


def _apart(x):
    return x, x.clone()


class Normalising(Classifier):
    """Learns labels and to restore a part of the input, one tensor of which it normalises in place."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def training_step(self, batch, batch_idx):
        *pair, labels = batch
        pair[self.place].sub_(0.5).div_(0.25)
        first, second = pair
        whole = max(pair, key=lambda one: one.shape[1])
        net = self.net(nn.functional.pad(whole, (0, 8 - whole.shape[1])))
        return nn.functional.cross_entropy(net, labels) + (net - second[:, :3]).square().mean() + first.mean()


@WORKERS
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("pair", [_twice, _view, _view_first, _view_of_a_view, _parts, _apart])
def test_a_change_in_place_of_a_part_of_the_batch(compare, pair, place, workers):
    def collate(samples):
        x, y = default_collate(samples)
        return (*pair(x), y)

    def program(run):
        run.fit(Normalising(place), loader(collate_fn=collate, num_workers=workers))

    compare(program, served=None)


class Several(nn.Module):
    """Returns several tensors."""

    def __init__(self, several):
        super().__init__()
        self.layer, self.several = nn.Linear(8, 8), several

    def forward(self, x):
        return self.several(self.layer(x))


def _use(chain, x):
    hidden, other = chain.b(chain.a(x))
    hidden.data.relu_()
    return chain.head(chain.c(hidden) + other.mean(1, keepdim=True))


@pytest.mark.parametrize(
    "several",
    [
        pytest.param(lambda h: (h, h[:, 0:1]), id="and a view"),
        pytest.param(lambda h: (h, h), id="twice"),
        pytest.param(lambda h: (h, h.clone()), id="and a copy"),
        pytest.param(lambda h: torch.cat([h, h], 1).chunk(2, 1), id="halves"),
    ],
)
def test_a_change_in_place_of_one_output_of_a_layer(compare, several):
    def program(run):
        freezing = {"layer_modules": ["net.a", "net.b", "net.c"]}
        run.fit(Classifier(Chain(b=Several(several), call=_use)), freezing=freezing, max_epochs=5)

    compare(program)
