"""Padded samples: how long they were, and what stays the same however long they are padded."""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_egeria.caching.sizes import Lengths, Tables, along, content, form_length, is_padded, sample_lengths
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.tape import Meta, Tape

SAMPLES = [torch.arange(1, 1 + length) for length in (3, 5, 2)]


def boundary(tokens, width=4):
    """A node ``[samples, length, width]`` that follows from tokens of the program."""
    tape = Tape(Keys(), len(tokens), lambda places: [], lambda: None)
    leaf = tape.outside(tokens)
    meta = Meta.of(torch.empty(*tokens.shape, width))
    spec = torch.utils._pytree.tree_flatten(((0,), {}))[1]
    (node,) = tape.record("embed", lambda x: x, [leaf], spec, [meta])
    return node, leaf


def test_the_length_of_a_sample_is_that_before_the_padding():
    node, _ = boundary(pad_sequence(SAMPLES, batch_first=True))
    assert sample_lengths(node) == [4, 5, 3]  # one position of the padding belongs to a sample


def test_samples_are_padded_if_a_tensor_of_them_has_the_length():
    node, leaf = boundary(pad_sequence(SAMPLES, batch_first=True))
    assert is_padded(node)
    leaf.value = leaf.value[:, :4]
    assert not is_padded(node)
    pooled, _ = boundary(pad_sequence(SAMPLES, batch_first=True))
    pooled.meta = Meta.of(torch.empty(3, 5))
    assert not is_padded(pooled)
    pooled.meta = Meta.of(torch.empty(3, 4, 5).transpose(1, 2))  # a beginning of these rows is not one piece
    assert not is_padded(pooled)


def test_tables_go_on_while_they_begin_alike():
    tables = Tables()
    assert tables.goes_on(0, torch.arange(5))
    assert tables.goes_on(0, torch.arange(8))
    assert tables.goes_on(0, torch.arange(3))
    assert not tables.goes_on(0, torch.tensor([0, 1, 2, 3, 4, 5, 7]))
    assert tables.goes_on(1, torch.tensor([9]))
    assert len(tables) == 2


def test_classes_of_lengths_are_joined_and_kept_apart():
    lengths = Lengths()
    for length in (10, 20, 30, 40):
        lengths.add(length)
    lengths.keep(20, 10, same=False)
    lengths.keep(30, 10, same=True)
    assert lengths.to_compare(40) == [30, 20]
    assert lengths.to_compare(30) == []  # 10 was compared with 20 already
    lengths.keep(40, 20, same=True)
    own = np.array([10, 20, 30, 40, 50], np.int32)
    assert lengths.serves(own, 10).tolist() == [True, False, True, False, False]
    assert lengths.serves(own, 20).tolist() == [False, True, False, True, False]
    assert lengths.serves(own, 50).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("row", "other", "same"),
    [
        ([5, 6, 0], [5, 6, 0, 0, 0], True),
        ([5, 6], [5, 6, 0], False),  # nothing tells that 6 is not the padding
        ([5, 0, 6, 0], [5, 6, 0, 0], False),
        ([5, 6, 1], [5, 6, 0], False),
        ([0], [0, 0], True),
    ],
)
def test_content_is_the_same_however_long_a_row_is_padded(row, other, same):
    assert (content(torch.tensor(row)) == content(torch.tensor(other))) is same


def test_the_content_of_numbers_is_their_bits():
    minus, nan = torch.tensor([1.0, 0.0, -0.0]), torch.tensor([1.0, torch.nan])
    assert content(minus) != content(torch.tensor([1.0, 0.0, 0.0]))
    assert content(nan) == content(torch.tensor([1.0, torch.nan, torch.nan]))
    wide = torch.tensor([[1, 2], [0, 0], [0, 0]])
    assert content(wide) == content(wide[:2]) != content(wide[:1])
    assert content(torch.empty(3, 0)) == b""


def test_a_tensor_with_two_such_dimensions_has_none():
    _, leaf = boundary(torch.arange(15).view(3, 5))
    assert along(leaf.tape.outside(torch.zeros(5, 5)), 5) is None
    assert along(leaf.tape.outside(torch.zeros(5, 2)), 5).shape == (5, 2)
    assert along(leaf.tape.outside(torch.zeros(3, 1, 1, 5)), 5).shape == (5, 3, 1, 1)


def test_forms_have_room_for_longer_batches():
    assert [form_length(length) for length in (1, 32, 33, 100)] == [64, 64, 128, 256]
