"""Fields of samples as bytes and back."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lightning_egeria.caching.store.samples import (
    Absent,
    FieldMemory,
    Opaque,
    copied,
    decode,
    encode,
    is_numbers,
    leaves_of,
    stamp_of,
    with_descriptions,
    with_leaves,
    without_inputs,
)
from support.caching.stored import bits

Point = collections.namedtuple("Point", "x y")

LEAVES = [
    torch.randn(2, 3),
    torch.randn(3, 2).t(),
    torch.tensor(7),
    torch.empty(0, 4),
    torch.randn(4).to(torch.bfloat16),
    torch.tensor([float("nan"), -0.0, float("inf")]),
    torch.tensor([True, False]),
    torch.randn(2, dtype=torch.complex64),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.float32(1.5),
    np.array("text"),
    np.array([], dtype=np.float64),
    3,
    -0.0,
    float("nan"),
    True,
    None,
    "text with \u00e4",
    b"\x00bytes",
    [1, 2, 3],
    [],
]


def test_every_leaf_comes_back():
    for leaf, back in zip(LEAVES, decode(encode(LEAVES)), strict=True):
        assert bits(leaf) == bits(back)


@pytest.mark.parametrize("leaf", [object(), {1, 2}, torch.randn(2).to_sparse(), np.array([object()]), torch.nn.Linear])
def test_fields_of_other_types_are_opaque(leaf):
    assert decode(encode([leaf])) == [Opaque(type(leaf).__qualname__)]
    assert encode([Opaque(type(leaf).__qualname__)]) == encode([leaf])


def test_number_that_is_too_large_is_refused():
    with pytest.raises(TypeError, match="cannot be kept on disk"):
        encode([10**5000])


@pytest.mark.parametrize(
    "tensor", [torch.randn(3, 2), torch.randn(3, 2).t(), torch.arange(4), torch.tensor(1.0).half()]
)
def test_absent_tensor_is_described(tensor):
    absent = Absent.of(tensor)
    assert decode(encode([absent])) == [absent]
    assert (absent.shape, absent.stride, absent.torch_dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert absent == Absent.of(tensor.clone().as_strided(tensor.shape, tensor.stride()))
    assert absent.digest != Absent.of(tensor + 1).digest


def test_inputs_are_left_out_by_their_number():
    first, second = torch.ones(2), torch.zeros(3, 2).T
    left = decode(without_inputs(encode(with_descriptions(["text", first, 3, second])), [1]))
    assert left[0] == "text"
    assert left[1].equal(first)
    assert left[2:] == [3, Absent.of(second)]


def test_what_comes_back_may_be_changed():
    first, second = decode(encode([[1, 2], torch.zeros(2)])), decode(encode([[1, 2], torch.zeros(2)]))
    first[0].append(3)
    first[1].add_(1)
    assert second[0] == [1, 2]
    assert second[1].equal(torch.zeros(2))


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_a_value_error(data):
    try:
        leaves = decode(data)
    except ValueError:
        return
    assert isinstance(leaves, list)


@given(st.data())
def test_damaged_fields_are_fields_or_a_value_error(data):
    encoded = bytearray(encode([torch.arange(3), 5, "text", np.ones(2)]))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(encoded))
    except ValueError:
        return


@pytest.mark.parametrize("sample", [{"a": 1, "b": (2, Point(3, [4, "x"]))}, Point(1, 2), [1, "a"], 5, (), {}])
def test_structure_and_leaves(sample):
    leaves = list(leaves_of(sample))
    assert leaves == pytree.tree_leaves(sample, is_leaf=is_numbers)
    assert with_leaves(sample, iter(leaves)) == sample
    assert type(with_leaves(sample, iter(leaves))) is type(sample)


def _leaves():
    return [torch.arange(3), Absent.of(torch.zeros(2)), np.arange(2), [1, 2], "cat"]


def test_copies_of_leaves_in_memory_may_be_changed():
    fields, memory = encode(_leaves()), FieldMemory(5, (1,))
    for read in (fields, b""):
        leaves = memory.get(stamp_of(fields), lambda read=read: read)
        tensor, _, array, numbers, _ = found = [copied(leaf) for leaf in leaves]
        assert bits(found) == bits(_leaves())
        tensor.add_(1)
        array += 1
        numbers.clear()


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"torn",
        encode(_leaves()[:4]),
        encode([torch.arange(3), torch.zeros(2), *_leaves()[2:]]),
        encode([*_leaves()[:4], object()]),
    ],
    ids=["gone", "torn", "other length", "other inputs", "opaque"],
)
def test_memory_knows_no_other_fields(fields):
    memory = FieldMemory(5, (1,))
    assert memory.get(stamp_of(fields), lambda: fields) is None
    assert memory.get(stamp_of(encode(_leaves())), lambda: fields) is None
