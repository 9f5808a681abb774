"""Outputs of the front that wait for rows of them to be trained."""

import types

import numpy as np
import pytest
import torch

from lightning_egeria.caching.outputs import Output, Read
from lightning_egeria.lazy.tape import Meta

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
