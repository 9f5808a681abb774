"""Lazy tensors arrive in another process as what they were."""

import pickle

import pytest
import torch
from lazies import BY_ROW, Source, X, is_lazy

from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.sending import Sent, operation, receive, send
from lightning_egeria.lazy.tape import Tape
from lightning_egeria.lazy.tensors import plain


def test_what_is_sent_can_be_pickled():
    sent = pickle.loads(pickle.dumps(Sent((((0, 0), None, None),), torch.ones(2))))
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


@pytest.mark.parametrize("name", SEVERAL_RESULTS)
def test_other_batches_are_sent_as_they_are(name):
    sent = pickle.loads(pickle.dumps(send(BY_ROW[name](Source(X).batch()))))
    assert type(sent) is torch.Tensor
    assert sent.equal(BY_ROW[name](X))
