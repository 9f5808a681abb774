"""What may be cached, tried on one batch."""

import pytest
import torch
from lazies import ONE_ARGUMENT, Layers, Source
from torch.nn import functional as F

from lightning_egeria.caching.trial import is_rounding, smaller_sizes, try_boundary
from lightning_egeria.lazy.meta import Meta
from lightning_egeria.lazy.tensors import plain
from lightning_egeria.snapshots.digests import same_bits

X = torch.randn(8, 4)
W = torch.randn(4, 4)


def trial(function, x=X, before=lambda x: x):
    """The boundary behind a function of a batch, and its value in the program."""
    batch = before(Source(x).batch())
    value = function(plain(batch).clone())
    node = batch.node.tape.record("layers", Layers(function), [batch.node], ONE_ARGUMENT, [Meta.of(value)])[0]
    return node, value


class Steps:
    """A function that also depends on how often it was called."""

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return x + self.count


def _by_place(x):
    return x * torch.linspace(1, 2, len(x))[:, None]


ACCEPTED = {
    "linear": lambda x: F.linear(x, W),
    "normalised rows": lambda x: F.layer_norm(x, (4,)),
    "fixed statistics": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "reshaped": lambda x: x.view(len(x), 2, 2).transpose(1, 2),
    "shape in the program": lambda x: x.view(8, 2, 2),
    "integers": lambda x: x.round().long(),
    "not a number": lambda x: (x - 10).log(),
}
BATCH, AGAIN, PLACE = "other samples of its batch", "same input gave another output", "place in the batch"
SHAPE = "does not begin with the 8 samples"
REFUSED = {
    "batch mean": (lambda x: x - x.mean(0), BATCH),
    "batch statistics": (lambda x: F.batch_norm(x, None, None, training=True), BATCH),
    "small share of the sum": (lambda x: x + 1e-6 * x.sum(), BATCH),
    "neighbour": (lambda x: x + x.roll(1, 0), BATCH),
    "maximum": (lambda x: x / x.abs().amax(), BATCH),
    "sorted": (lambda x: x.sort(0)[0], BATCH),
    "dropout": (lambda x: F.dropout(x, 0.5), AGAIN),
    "noise": (lambda x: x + torch.rand_like(x), AGAIN),
    "unused draw": (lambda x: x + 0 * torch.rand(()), "draw random numbers"),
    "counter": (Steps(), AGAIN),
    "place": (_by_place, PLACE),
    "one row": (lambda x: x[:1], SHAPE),
    "no batch": (lambda x: x.sum(0), SHAPE),
    "number": (lambda x: x.sum(), SHAPE),
}


@pytest.mark.parametrize("function", ACCEPTED.values(), ids=ACCEPTED)
def test_rows_by_themselves_are_accepted(function):
    assert try_boundary(*trial(function)) == (None, True)


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_boundary_is_refused(function, reason):
    assert reason in try_boundary(*trial(function))[0]


def test_rows_that_the_program_made_are_followed():
    assert try_boundary(*trial(torch.tanh, before=lambda x: x + torch.arange(8.0)[:, None])) == (None, True)


def test_input_that_the_layers_change_is_refused():
    outside = Source(X).tape.outside(X.clone())
    outside.value.add_(1)
    node = outside.tape.record("layers", Layers(torch.tanh), [outside], ONE_ARGUMENT, [Meta.of(X)])[0]
    assert try_boundary(node, torch.tanh(X))[0] == "the frozen layers change their input in place"


def test_boundary_that_reads_no_sample_is_refused():
    constant = Source(X).tape.outside(torch.ones(3))
    node = constant.tape.record("layers", Layers(lambda x: torch.zeros(8, 3)), [constant], ONE_ARGUMENT, [Meta.of(X)])
    assert try_boundary(node[0], torch.zeros(8, 3))[0] == "it depends on no tensor of the batch"


def test_rounding_by_place_is_accepted_and_told():
    """The last bit depends on the place in the batch, and on nothing else."""

    def rounds(x):
        return torch.where(torch.arange(len(x))[:, None] == 3, torch.nextafter(x, x + 1), x)

    assert try_boundary(*trial(rounds)) == (None, False)


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    node, value = trial(torch.tanh)
    try_boundary(node, value)
    try_boundary(*trial(lambda x: x * 2))
    assert torch.get_rng_state().equal(before)


def test_batch_of_one_is_accepted():
    assert try_boundary(*trial(torch.tanh, X[:1])) == (None, True)


def test_smaller_sizes_have_the_same_bits():
    assert smaller_sizes(*trial(torch.tanh)) == [2, 4]
    assert smaller_sizes(*trial(lambda x: x.view(8, 4))) == []  # of 8 rows only
    assert smaller_sizes(*trial(lambda x: x if len(x) != 2 else x + 1e-6)) == [4]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (None, torch.zeros(2), False),
        (torch.ones(2, 3).t().bfloat16(), torch.ones(3, 2).bfloat16(), True),
    ],
)
def test_bits_are_compared(first, second, same):
    assert same_bits(first, second) is same


def test_rounding_is_a_few_last_bits_of_the_largest_value():
    value = torch.tensor([1000.0, 1e-6])
    assert is_rounding(value + torch.tensor([0, 1e-3]), value)
    assert not is_rounding(value + torch.tensor([0.1, 0]), value)
    assert not is_rounding(value.long(), value.long() + 1)
