"""Lazy tensors arrive in another process as what they were."""

import pickle

import pytest
import torch

from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import Meta
from lightning_egeria.caching.record.sending import Sent, joined, operation, receive, send
from lightning_egeria.caching.record.tape import Tape
from lightning_egeria.caching.record.tensors import plain, show
from support.caching.lazies import BY_ROW, Source, X, is_lazy


def test_what_is_sent_can_be_pickled():
    sent = pickle.loads(pickle.dumps(Sent((((0, 0), None, None),), (0,), (None,), torch.ones(2))))
    assert sent.value.equal(torch.ones(2))


@pytest.mark.parametrize("name", ["aten.stack.default", "aten.add.Tensor", "aten.constant_pad_nd.default"])
def test_operation_is_found_by_its_name(name):
    assert str(operation(name)) == name


SEVERAL_RESULTS = ("in place", "split", "normalised")  # of one operation, which has no place among the steps


@pytest.mark.parametrize("name", [name for name in BY_ROW if name not in SEVERAL_RESULTS])
def test_batch_arrives_lazily_with_its_values(name):
    function = BY_ROW[name]
    source = Source(X)
    sent = pickle.loads(pickle.dumps(send({"x": function(source.batch()), "n": 6})))
    assert source.loaded == []
    loads = []

    def load(places):
        loads.extend(places)
        return [X[position] for position, _ in places]

    arrived = receive(sent, Tape(Keys(), len(X), load, lambda: None))
    assert arrived["n"] == 6
    assert is_lazy(arrived["x"])
    assert loads == []
    assert plain(arrived["x"]).equal(function(X))
    assert sorted(loads) == [(position, 0) for position in range(6)]


def test_rows_that_are_loaded_are_sent_together():
    """But one of another form, or with gaps, on its own."""
    tape = Tape(Keys(), 5, None, lambda: None)
    values = [X[0], torch.stack([X[1], X[1]], 1)[:, 0], X[2].clone(), None, X[4]]
    batch = torch.stack([show(tape.row(at, 0, Meta.of(X[0]), value)) for at, value in enumerate(values)])
    sent = pickle.loads(pickle.dumps(send(batch, keep_rows=True)))
    assert sent.rows.equal(X[[0, 2, 4]])
    loads = []

    def load(places):
        loads.extend(places)
        return [X[position] for position, _ in places]

    assert plain(receive(sent, Tape(Keys(), 5, load, lambda: None))).equal(X[:5])
    assert loads == [(3, 0)]


@pytest.mark.parametrize("name", SEVERAL_RESULTS)
def test_other_batches_are_sent_as_they_are(name):
    sent = pickle.loads(pickle.dumps(send(BY_ROW[name](Source(X).batch()))))
    assert type(sent) is torch.Tensor
    assert sent.equal(BY_ROW[name](X))


def test_rows_of_several_tensors_become_one():
    first, second = Source(X), Source(X + 10)
    sent = joined([(first.batch(), [4, 1]), (second.batch(), [0])])
    assert first.loaded == second.loaded == []
    loads = []

    def load(places):
        loads.extend(places)
        return [torch.full(X.shape[1:], float(position)) for position, _ in places]

    arrived = receive({"x": sent}, Tape(Keys(), 3, load, lambda: None))["x"]
    assert is_lazy(arrived)
    assert arrived.shape == (3, *X.shape[1:])
    assert plain(arrived).equal(torch.stack([torch.full(X.shape[1:], float(row)) for row in range(3)]))
    assert sorted(loads) == [(row, 0) for row in range(3)]  # numbered anew


def test_rows_that_are_there_are_not_loaded_again():
    source = Source(X)
    batch = source.batch()
    plain(batch)
    arrived = receive(joined([(batch, [3, 3])]), Tape(Keys(), 2, None, lambda: None))
    assert plain(arrived).equal(X[[3, 3]])


def test_rows_of_a_computed_tensor_have_no_name():
    assert joined([(Source(X).batch(), [0]), (Source(X).batch() * 2, [0])]) is None


@pytest.mark.parametrize("loaded", [False, True])
def test_what_shares_memory_does_so_where_it_arrives(loaded):
    source = Source(X)
    batch = source.batch()
    if loaded:
        plain(batch)
    sent = send({"x": batch, "again": batch, "view": batch[:, :2], "copy": batch.clone()})
    tape = Tape(Keys(), len(X), lambda places: [X[position] for position, _ in places], lambda: None)
    arrived = receive(sent if loaded else pickle.loads(pickle.dumps(sent)), tape)
    assert arrived["again"] is arrived["x"]
    arrived["x"].add_(1)
    assert plain(arrived["view"]).equal(X[:, :2] + 1)
    assert plain(arrived["copy"]).equal(X)
