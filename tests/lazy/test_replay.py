"""Recorded computations once more, for other rows."""

import pytest
import torch

from lightning_egeria.caching.record.replay import copy_rows, replay
from lightning_egeria.caching.record.tensors import plain
from support.caching.lazies import BY_ROW, Source, X

PERMUTATIONS = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3], [1, 1, 1, 1, 1, 1], [0, 0, 1, 5, 5, 2]]


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


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)], ids=str)
def test_rows_are_copied_as_they_would_be_stacked(kind, shape):
    rows = [torch.randint(-3, 4, shape).to(kind) for _ in range(4)]
    made = torch.empty(4, *shape, dtype=kind)
    copy_rows(rows, made)
    assert made.equal(torch.stack(rows))
