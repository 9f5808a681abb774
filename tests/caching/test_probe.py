"""Whether rows depend on one another, on chance, or on their place."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_egeria.caching.probe import try_rows, why_not_a_row
from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import Meta
from lightning_egeria.caching.record.tape import Tape, Unit

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
ONE = pytree.tree_flatten(((0,), {}))[1]


class Frozen(Unit):
    """A call of a frozen module."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def recorded(function, x=X):
    """The node of a call with a batch of samples, and its value."""
    tape = Tape(Keys(), len(x), lambda places: [x[position] for position, _ in places], lambda: None)
    rows = [tape.row(position, 0, Meta.of(x[position])) for position in range(len(x))]
    flat, spec = pytree.tree_flatten(((rows,), {}))
    stack = torch.ops.aten.stack.default
    (batch,) = tape.record(str(stack), stack, flat, spec, [Meta.of(x)])
    value = function(x.clone())
    (node,) = tape.record("frozen", Frozen(function), [batch], ONE, [Meta.of(value)])
    return node, value


LINEAR = nn.Linear(4, 3).requires_grad_(False)
NORM = nn.BatchNorm1d(4, affine=False)


def counts(x, calls=[]):  # noqa: B006  # it is the point
    calls.append(1)
    return x + len(calls)


class TestARowIsAFunctionOfItsSample:
    @pytest.mark.parametrize(
        "function",
        [
            torch.sin,
            lambda x: x.view(len(x), 2, 2).mean(1),
            lambda x: F.layer_norm(x, (4,)),
        ],
    )
    @pytest.mark.parametrize("size", [1, 2, 3, 6])
    def test_same_bits_at_each_place(self, function, size):
        assert try_rows(*recorded(function, X[:size])) == (None, True)

    def test_to_rounding_for_a_product(self):
        problem, _ = try_rows(*recorded(LINEAR))
        assert problem is None

    def test_rounding_by_place_is_told(self):
        """The last bits go by the place, as those of some kernels do."""
        by_place = torch.tensor([[1.0], [1 + 2**-23]]).repeat(3, 1)
        assert try_rows(*recorded(lambda x: x * by_place[: len(x)])) == (None, False)


REFUSED = {
    "batch statistics": (NORM, "the output of one sample depends on the other samples of its batch"),
    "mean of the batch": (lambda x: x - x.mean(0), "the output of one sample depends on the other samples"),
    "the row before": (lambda x: x + x.roll(1, 0), "the output of one sample depends on the other samples"),
    "sorted": (lambda x: x.sort(0).values, "the output of one sample depends on the other samples"),
    "its place": (lambda x: x + torch.arange(len(x))[:, None], "the output of a sample depends on its place"),
    "dropout": (lambda x: F.dropout(x, 0.5), "the frozen modules draw random numbers"),
    "counter": (counts, "the same input gave another output"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_function_of_a_sample_is_refused(function, reason):
    problem, exact = try_rows(*recorded(function))
    assert problem.startswith(reason)
    assert not exact


def test_a_probe_leaves_the_random_state():
    node, value = recorded(lambda x: F.dropout(x, 0.5))
    before = torch.get_rng_state()
    try_rows(node, value)
    assert torch.get_rng_state().equal(before)


def test_a_computation_that_fits_only_these_samples_is_refused():
    def fits(x):
        if not x.equal(X):
            raise RuntimeError
        return x

    problem, _ = try_rows(*recorded(fits))
    assert problem.startswith("its computation fits only these samples")


def test_a_value_that_starts_from_a_kept_one_is_tried_from_there():
    node, value = recorded(torch.sin)
    (behind,) = node.tape.record("more", Frozen(torch.cos), [node], ONE, [Meta.of(value)])
    node.value = value
    ran = []
    node.call.run.function = lambda x: ran.append(x) or torch.sin(x)
    assert try_rows(behind, value.cos(), [node]) == (None, True)
    assert ran == []


class TestShapesAndLeaves:
    def test_rows_begin_with_samples(self):
        assert why_not_a_row(*recorded(torch.sin)) is None
        assert "does not begin with the 6 samples" in why_not_a_row(*recorded(torch.sum))
        assert "does not begin with the 6 samples" in why_not_a_row(*recorded(torch.t))

    def test_something_of_the_batch_is_behind_it(self):
        tape = Tape(Keys(), 6, lambda places: [], lambda: None)
        (node,) = tape.record("frozen", Frozen(torch.sin), [tape.outside(torch.zeros(3))], ONE, [Meta.of(X)])
        assert why_not_a_row(node, X) == "it depends on no tensor of the batch"
        (node,) = tape.record("frozen", Frozen(torch.sin), [tape.outside(X)], ONE, [Meta.of(X)])
        assert why_not_a_row(node, X) is None

    def test_a_large_tensor_that_changed_is_told(self):
        tape, large = Tape(Keys(), 6, lambda places: [], lambda: None), torch.zeros(6, 2**19)
        (node,) = tape.record("frozen", Frozen(torch.sin), [tape.outside(large)], ONE, [Meta.of(large)])
        large.add_(1)
        assert why_not_a_row(node, large) == "the frozen modules change their input in place"
