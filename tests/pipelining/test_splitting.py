"""Micro-batches: whatever has one row a sample is shared out."""

import dataclasses

import numpy as np
import pytest
import torch

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.splitting import split


def test_a_batch_without_samples_is_refused():
    with pytest.raises(UnsupportedError, match="cannot be split"):
        split({"x": 3}, 2)
    with pytest.raises(UnsupportedError, match="has no samples"):
        split(torch.ones(0, 2), 2)


def test_a_small_batch_has_fewer_parts():
    assert [share for _, share in split(torch.arange(2), 4)] == [0.5, 0.5]


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    name: list
    number: np.ndarray
    weight: float


def test_lists_arrays_and_fields_are_split_and_the_rest_is_kept():
    batch = Batch(torch.arange(3), ["a", "b", "c"], np.arange(3), 0.5)
    (first, share), (second, _) = split(batch, 2)
    assert (first.image.tolist(), first.name, first.number.tolist(), first.weight) == ([0, 1], ["a", "b"], [0, 1], 0.5)
    assert (second.image.tolist(), second.name, share) == ([2], ["c"], 2 / 3)


def test_numbers_in_lists_are_split_by_sample():
    """As many in each sample as there are samples: `default_collate` makes a list of columns of them."""
    parts = split({"x": torch.arange(2), "box": [torch.arange(2), torch.arange(2) + 10]}, 2)
    assert [[column.tolist() for column in part["box"]] for part, _ in parts] == [[[0], [10]], [[1], [11]]]
