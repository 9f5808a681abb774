"""Outputs of the front that wait for rows of them to be trained."""

import types

import numpy as np
import pytest
import torch

from lightning_egeria.caching.outputs import Output, Read, agree
from lightning_egeria.lazy.meta import Meta
from lightning_egeria.stores.rows import RowForm

STATE = object()


def output(first, rows=4, key=7, state=STATE):
    value = torch.arange(first, first + rows).float()[:, None]
    return Output(value, value._version, key, np.arange(first, first + rows).astype(np.uint64), state)


def test_rows_of_several_outputs_are_one():
    joined = Output.joined([(output(0), np.array([3, 1])), (output(10), np.array([0]))])
    assert joined.value[:, 0].tolist() == [3, 1, 10]
    assert joined.made.tolist() == [3, 1, 10]
    assert (joined.key, joined.state) == (7, STATE)


@pytest.mark.parametrize("other", [None, output(0, key=8), output(0, state=object())])
def test_outputs_of_other_computations_are_not_joined(other):
    assert Output.joined([(output(0), np.array([0])), (other, np.array([0]))]) is None


def test_an_output_that_was_changed_in_place_is_of_no_use():
    changed = output(0)
    changed.value.add_(1)
    assert Output.joined([(changed, np.array([0]))]) is None


def test_it_is_of_the_same_rows_of_the_same_front():
    one = output(0)
    node = types.SimpleNamespace(key=7, meta=Meta.of(one.value))
    assert one.is_of(node, one.made, STATE)
    assert not one.is_of(node, one.made + 1, STATE)
    assert not one.is_of(node, None, STATE)
    assert not one.is_of(node, one.made, object())
    assert not one.is_of(types.SimpleNamespace(key=8, meta=node.meta), one.made, STATE)
    assert not one.is_of(types.SimpleNamespace(key=7, meta=Meta.of(one.value[:2])), one.made, STATE)


def test_a_read_follows_the_order_of_the_batch():
    read = Read(None, np.array([0, 2, 3]), None).in_order([3, 0, 1])
    assert read.places.tolist() == [0, 1]
    assert read.rows.tolist() == [2, 0]


def test_rows_agree_to_rounding_of_their_precision():
    known = torch.randn(4, 5, 3)
    plain, ragged = RowForm.of(known), RowForm.of(known).with_room(8)
    for error, agrees in [(0.0, [True] * 4), (1e-4, [False, True, True, True]), (0.02, [False, False, False, True])]:
        found = known.clone()
        found[1, 2, 0] += error * known.abs().max()
        assert [
            agree(plain, known, found, True, torch.float32),
            agree(plain, known, found, False, torch.float32),  # in a batch of a size that nobody has compared
            agree(ragged, known, found, True, torch.float32),  # with other padding
            agree(plain, known, found, True, torch.bfloat16),  # under autocast, though the rows are float32
        ] == agrees
    assert not agree(ragged, known, known + 1, False, torch.bfloat16)
