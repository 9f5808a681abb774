"""Recorded operations, their names, and how they are computed anew."""

import pytest
import torch
from lazies import Source, is_lazy
from torch.nn import functional as F

from lightning_egeria.caching.keys import Keys, Of
from lightning_egeria.caching.lazy import plain
from lightning_egeria.caching.replay import replay
from lightning_egeria.caching.tape import Meta
from lightning_egeria.errors import CacheError

X, W = torch.randn(6, 4), torch.randn(4, 4)
PERMUTATIONS = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3], [1, 1, 1, 1, 1, 1], [0, 0, 1, 5, 5, 2]]
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


def test_meta_makes_a_tensor_like_the_first():
    tensor = torch.zeros(3, 2, dtype=torch.int16).t()
    meta = Meta.of(tensor)
    assert Meta.of(meta.empty()) == meta
    assert meta.empty("meta").is_meta


def test_keys_are_described_alike_in_each_process():
    first, second = Keys(), Keys()
    second.number(("something else",))
    numbers = [keys.number(("add", Of(keys.number(("row", 0))), 1)) for keys in (first, second)]
    assert numbers[0] != numbers[1]
    assert first.describe(numbers[0]) == second.describe(numbers[1])


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


def test_size_of_the_batch_is_not_part_of_the_key():
    functions = [lambda x: x.view(len(x), 2, 2), lambda x: x[:, :, None].expand(len(x), 4, 2)]
    for function in functions:
        assert key(function) == key(function, X[:3])


@pytest.mark.parametrize("function", BY_ROW.values(), ids=BY_ROW)
@pytest.mark.parametrize("places", PERMUTATIONS, ids=str)
def test_replay_is_the_computation_of_those_rows(function, places):
    result = function(Source(X).batch())
    expected = function(X[places])
    assert replay(result.node, places).equal(expected)
    assert plain(result).equal(function(X))


@pytest.mark.parametrize("name", ["scaled", "matrix", "flattened", "expanded", "split"])
@pytest.mark.parametrize("places", [[4], [0, 3], [5, 1, 1]], ids=str)
def test_replay_of_fewer_rows(name, places):
    assert replay(BY_ROW[name](Source(X).batch()).node, places).equal(BY_ROW[name](X[places]))


def test_replay_loads_only_the_rows_it_needs():
    source = Source(X)
    replay((source.batch() * 2).node, [4, 1])
    assert sorted(source.loaded) == [(1, 0), (4, 0)]


def test_replay_begins_with_given_values():
    source = Source(X)
    middle = source.batch() + 1
    end = middle * 3
    given = {middle.node: torch.full((2, 4), 5.0)}
    assert replay(end.node, [0, 3], given).equal(torch.full((2, 4), 15.0))
    assert source.loaded == []


def test_replay_takes_the_rows_of_tensors_from_outside():
    result = (Source(X).batch() + torch.arange(6.0)[:, None]).node
    assert replay(result, [5, 0]).equal(X[[5, 0]] + torch.tensor([[5.0], [0.0]]))


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.stack([r * 2 for r in x.unbind()]), lambda x: x.view(3, 8)[:, :4], lambda x: x.sum()],
    ids=["rows in a loop", "another batch dimension", "no batch dimension"],
)
def test_replay_of_another_size_is_refused_where_it_does_not_fit(function):
    assert replay(function(Source(X).batch()).node, [0, 1]) is None


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


def test_large_tensor_from_outside_must_not_change(monkeypatch):
    monkeypatch.setattr("lightning_egeria.caching.tape.SNAPSHOT_BYTES", 0)
    offset = torch.ones(4)
    result = Source(X).batch() + offset
    offset.fill_(100)
    with pytest.raises(CacheError, match=r"shape \(4,\) changed in place after .* Leave out FrozenPrefixCache"):
        plain(result)


def test_settle_computes_what_the_program_holds():
    source = Source(X)
    kept = source.batch() * 2
    source.tape.settle(computed_only=True)
    assert is_lazy(kept)
    source.tape.settle()
    assert kept.is_known
    assert source.touched == 1
