"""Lazy batches whose values are known to the test."""

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import Meta
from lightning_egeria.caching.record.tape import Tape, Unit
from lightning_egeria.caching.record.tensors import LazyTensor, plain, show

X, W = torch.randn(6, 4), torch.randn(4, 4)
# Functions of a batch, each row by itself.
BY_ROW = {
    "row": lambda x: x,
    "scaled": lambda x: x * 2 + 1,
    "matrix": lambda x: x @ W,
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "cast": lambda x: x.double().round(),
    "view": lambda x: x.view(6, 2, 2).transpose(1, 2),
    "flattened": lambda x: x.view(len(x), 2, 2).flatten(1),
    "split": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "normalised": lambda x: F.layer_norm(x, (4,)),
    "reduced": lambda x: x.sum(1),
    "expanded": lambda x: x[:, :, None].expand(len(x), 4, 2),
}


ONE_ARGUMENT = pytree.tree_flatten(((0,), {}))[1]


class Layers(Unit):
    """Frozen layers that compute a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


class Source:
    """Samples, and the tape that loads them.

    Attributes:
        loaded: what was loaded: pairs of a position and a tensor's number.
        touched: how often values were needed.
    """

    def __init__(self, *tensors, keys=None, owner=None):
        self.tensors, self.loaded, self.touched = tensors, [], 0
        self.tape = Tape(keys or Keys(), len(tensors[0]), self._load, self._touch, owner)

    def rows(self, number=0, order=None):
        """Lazy tensors of one tensor of each sample."""
        rows = self.tensors[number]
        places = range(len(rows)) if order is None else order
        return [show(self.tape.row(place, number, Meta.of(rows[place]))) for place in places]

    def batch(self, number=0):
        """A lazy batch, as the default collate function makes it."""
        return torch.stack(self.rows(number))

    def _load(self, places):
        self.loaded += places
        return [self.tensors[number][position].clone() for position, number in places]

    def _touch(self):
        self.touched += 1


def lazy(tensor):
    """A lazy batch with the values of ``tensor``."""
    return Source(tensor).batch()


def is_lazy(tensor):
    return isinstance(tensor, LazyTensor) and not tensor.is_known


def described(tree):
    """Every tensor as type, strides and bits, for a comparison."""
    return pytree.tree_map_only(torch.Tensor, _described, tree)


def _described(tensor):
    value = plain(tensor).detach()
    return str(value.dtype), tuple(value.shape), value.stride(), value.resolve_conj().resolve_neg().tolist()
