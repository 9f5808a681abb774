"""What the network is given besides the batch."""

import pytest
import torch

from lightning_egeria.caching.arguments import KEPT_TENSORS, Layout, OtherArguments


def masks(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def test_one_value_is_known_for_each_length():
    others = OtherArguments({0})
    tokens = torch.zeros(8, 5)
    for length in (5, 7, 5, 8, 7):
        assert others.changed((tokens,), {"mask": masks(length)}, 8, length) is None
    assert others.changed((tokens,), {"mask": ~masks(7)}, 8, 7) == "'mask'"
    assert others.changed((tokens,), {"mask": masks(7)}, 8, 7) is None


def test_what_is_kept_of_lengths_is_bounded():
    others = OtherArguments(set())
    for length in range(1, 3 * KEPT_TENSORS):
        assert others.changed((masks(length),), {}, 8, length) is None
    assert len(others._tensors) == KEPT_TENSORS


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2), (1, 1.0), (True, 1), ("a", "b"), (None, 0), ([1, 2], [1, 3]), ([1], [1, 2]), ({"a": 1}, {"b": 1})],
)
def test_numbers_and_texts_must_be_equal(first, second):
    others = OtherArguments(set())
    assert others.changed((first,), {}, 8, None) is None
    assert others.changed((first,), {}, 8, None) is None
    assert others.changed((second,), {}, 8, None).startswith("number 1")


def test_other_objects_and_free_tensors_are_not_compared():
    others = OtherArguments({0})
    others.leave_free({1})
    for _ in range(2):
        assert others.changed((torch.rand(8), torch.rand(3), object()), {"nan": float("nan")}, 8, None) is None


def test_layouts_of_batches_of_another_size_agree():
    x, one = torch.rand(8, 3, 5, 5), torch.rand(1, 1, 7, 7)
    assert Layout.of(x, x.flatten(1)).agrees(Layout.of(one, one.flatten(1)))
    assert Layout.of(x, x.transpose(2, 3)).agrees(Layout.of(one, one.transpose(2, 3)))
    assert not Layout.of(x, x).agrees(Layout.of(one, one.transpose(2, 3)))
    assert not Layout.of(x, x).agrees(Layout.of(one, one.flatten(1)))
    assert not Layout.of(x, x[:, :2]).agrees(Layout.of(x, x[:, 1:]))
