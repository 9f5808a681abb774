"""What frozen layers are given and return besides tensors of the batch, and parameters that no step uses."""

import weakref

import pytest
import torch
from torch import nn

from support.caching.parts import SAMPLES, Chain, Classifier


class Layer(nn.Module):
    """Returns more than a tensor.

    Args:
        more: what, from its output.
    """

    def __init__(self, more):
        super().__init__()
        self.linear, self.more = nn.Linear(8, 8), more

    def forward(self, x, *given, **named):
        x = self.linear(x).tanh()
        return x, *self.more(x, *given, **named)


def chain(more, given=lambda x: ()):
    """Two layers that return more, and one that does not."""

    def call(net, x):
        x, *_ = net.a(x, *given(x))
        x, *rest = net.b(x, *given(x))
        return net.head(net.c(x)) * (1 if not rest or rest[-1] is None else rest[-1])

    return Chain(a=Layer(more), b=Layer(more), call=call)


MORE = {
    "nothing": lambda x: [None],
    "sizes": lambda x: [None, tuple(x.shape[1:]), x.shape[1]],
    "height and width": lambda x: [{"kind": "tanh", "sizes": (2, x.shape[1] // 2)}, None],
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_constants_come_back_beside_entries(compare, more):
    compare(lambda run: run.fit(Classifier(chain(more)), max_epochs=5))


READ = {
    "a number of all": lambda x: [x.sum().item()],
    "a count": lambda x: [int((x > 0).sum())],
    "a rare flag": lambda x: [bool((x > 0.99).any())],
}


@pytest.mark.parametrize("more", READ.values(), ids=READ)
def test_numbers_that_depend_on_values_are_read_from_the_layers_inside(compare, more):
    compare(lambda run: run.fit(Classifier(chain(more)), max_epochs=5), served=None)


class Memory:
    """Collects what layers give it, as the keys and values of a language model."""

    def __init__(self):
        self.kept = []

    def add(self, x):
        self.kept.append(x)
        return [sum(float(one.detach().sum()) for one in self.kept)]


def test_an_object_that_may_change_is_given_to_the_layer_itself(compare):
    made = []

    def given(x):
        made.append(weakref.ref(memory := Memory()))
        return [memory]

    def program(run):
        run.fit(Classifier(chain(lambda x, memory: memory.add(x), given)), max_epochs=5)

    compare(program, served=None)
    assert not any(one() is not None for one in made)


class Masked(nn.Module):
    """A layer with a token for masked positions, as in a vision transformer, which fine-tuning leaves alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.token = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x, mask=None):
        x = self.linear(x)
        return torch.tanh(x if mask is None else torch.where(mask, self.token, x))


def test_a_parameter_that_no_step_uses_freezes_too(compare):
    trains = []

    class Noting(Classifier):
        def training_step(self, batch, batch_idx):
            self.token_trains = self.net.a.token.requires_grad
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            trains.append(self.token_trains)

    cached = compare(lambda run: run.fit(Noting(Chain(a=Masked())), max_epochs=5))
    assert cached.caches[0].stats.hits > SAMPLES
    assert trains == [False] * 10  # the user's own setting returns at the end of a fit
