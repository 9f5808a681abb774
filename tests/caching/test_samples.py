"""Fields of samples as bytes and back."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_egeria.caching.samples import StandIn, copy_of, decode, encode, leaves_of, same_leaf, with_leaves

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
        assert same_leaf(leaf, back), leaf


@pytest.mark.parametrize("leaf", [object(), {1, 2}, torch.randn(2).to_sparse(), np.array([object()]), torch.nn.Linear])
def test_what_cannot_be_kept_is_refused(leaf):
    with pytest.raises(TypeError, match="cannot be kept on disk"):
        encode([leaf])


def test_stand_ins_take_no_memory_and_are_nan():
    for leaf in (torch.randn(3, 1000), np.ones((3, 1000), np.float32)):
        (back,) = decode(encode([StandIn.of(leaf)]))
        assert back.shape == leaf.shape
        assert back.dtype == leaf.dtype
        assert (back != back).all()
        assert not any(back.stride() if isinstance(back, torch.Tensor) else back.strides)
    assert decode(encode([StandIn.of([5, 6])])) == [[0, 0]]


def test_what_comes_back_may_be_changed():
    first, second = decode(encode([[1, 2]])), decode(encode([[1, 2]]))
    first[0].append(3)
    assert second == [[1, 2]] == decode(encode([[1, 2]]))
    tensor = torch.zeros(2)
    copy_of(tensor).add_(1)
    assert tensor.equal(torch.zeros(2))


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
    assert with_leaves(sample, iter(leaves)) == sample
    assert type(with_leaves(sample, iter(leaves))) is type(sample)


def test_bits_decide():
    assert same_leaf(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_leaf(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_leaf(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_leaf(np.float32(1), 1.0)
    assert not same_leaf([1], [1, 2])


def test_tensors_without_bits_cannot_be_compared():
    with pytest.raises(TypeError, match="cannot be compared"):
        same_leaf(torch.eye(3).to_sparse(), torch.eye(3).to_sparse())
