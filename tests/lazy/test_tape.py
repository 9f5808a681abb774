"""Recorded operations, their names, and how they are computed anew."""

import pytest
import torch
from torch import nn

from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.replay import replay
from lightning_egeria.caching.record.tensors import plain
from support.caching.lazies import BY_ROW, ONE_ARGUMENT, Layers, Source, W, X, is_lazy


def key(function, x=X):
    """Of a function of a batch, among the numbers of all."""
    return function(Source(x, keys=KEYS).batch()).node.key


KEYS = Keys()


@pytest.mark.parametrize("function", BY_ROW.values(), ids=BY_ROW)
def test_same_computation_has_the_same_key(function):
    assert key(function) == key(function, torch.randn(6, 4))


def test_different_computations_have_different_keys():
    functions = [*BY_ROW.values(), lambda x: x * 2, lambda x: x * 2.0, lambda x: x * True, lambda x: 2 * x + 1.5]
    numbers = [key(function) for function in functions]
    assert len(set(numbers)) == len(numbers)


def test_operations_that_end_elsewhere_do_not_count():
    def call(noise):
        """The key of layers that are given ``x * W + 1``, behind other operations that are not theirs."""
        source = Source(X, keys=KEYS)
        x = source.batch()
        kept = [x + torch.ones(4) for _ in range(noise)]
        given = x * W[0] + torch.ones(4)
        layers = Layers(torch.sin)
        (node,) = source.tape.record("layers", layers, [given.node], ONE_ARGUMENT, [given.node.meta])
        assert len(kept) == noise
        return node.key

    assert call(0) == call(3)


def test_another_use_of_a_tensor_from_outside_has_another_key():
    def twice(x):
        first, second = torch.ones(4), torch.ones(4)
        return (x + first) * second + first

    def thrice(x):
        first, second = torch.ones(4), torch.ones(4)
        return (x + first) * second + second

    assert key(twice) == key(twice)
    assert key(twice) != key(thrice)


def test_size_of_the_batch_is_not_part_of_the_key():
    functions = [lambda x: x.view(len(x), 2, 2), lambda x: x[:, :, None].expand(len(x), 4, 2)]
    for function in functions:
        assert key(function) == key(function, X[:3])


def test_order_of_rows_is_the_order_of_the_first_stack():
    source = Source(X)
    batch = torch.stack(source.rows(order=[3, 0, 5]))
    assert (source.tape.order, source.tape.size) == ([3, 0, 5], 3)
    assert replay((batch * 2).node, [1, 2]).equal(X[[0, 5]] * 2)


def test_intermediate_values_are_not_kept():
    source = Source(X)
    middle = source.batch() + 1
    node = middle.node
    end = middle * 2
    del middle
    assert plain(end).equal((X + 1) * 2)
    assert node.value is None


def test_small_tensor_from_outside_may_change_later():
    offset = torch.ones(4)
    result = Source(X).batch() + offset
    offset.fill_(100)
    assert plain(result).equal(X + 1)


def test_tensor_that_numpy_changes_is_another_one():
    tape, tensor = Source(X).tape, torch.ones(3)
    first = tape.outside(tensor)
    assert tape.outside(tensor) is first
    tensor.numpy()[0] = 5  # which its version does not count
    second = tape.outside(tensor)
    assert second.key != first.key
    assert second.value.equal(tensor)


@pytest.mark.parametrize("most_bytes", [0, 2**22])
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_what_a_weight_was_counts(monkeypatch, kind, most_bytes):
    """Also if its version does not count the change. Large ones are not copied: the operation runs at once."""
    monkeypatch.setattr("lightning_egeria.caching.record.meta.MOST_BYTES", most_bytes)
    weight = torch.ones(4) if kind is torch.Tensor else nn.Parameter(torch.ones(4), requires_grad=False)
    result = Source(X).batch() * weight
    assert is_lazy(result) == (most_bytes > 0)
    weight.data.fill_(100)
    assert plain(result).equal(X)


def test_settle_computes_what_the_program_holds():
    source = Source(X)
    kept = source.batch() * 2
    source.tape.settle(computed_only=True)
    assert is_lazy(kept)
    source.tape.settle()
    assert kept.is_known
    assert source.touched == 1
