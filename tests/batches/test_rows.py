"""Rows of batches."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from lightning_egeria.batches.rows import Rows, samples_of
from lightning_egeria.errors import RowsError

ROWS = np.array([2, 0])
Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    texts: list


def taken(batch, samples=3):
    return Rows.of(batch, samples).take(ROWS).batch()


def test_nested_structures_keep_their_types():
    x = torch.arange(6.0).view(3, 2)
    batch = {"a": [x, Pair(x, "all")], "n": np.arange(3), "text": ("p", "q", "r"), "scale": torch.tensor(2.0)}
    found = taken(batch)
    assert torch.equal(found["a"][0], x[[2, 0]])
    assert isinstance(found["a"][1], Pair)
    assert found["a"][1].y == "all"
    assert found["n"].tolist() == [2, 0]
    assert found["text"] == ("r", "p")
    assert found["scale"] is batch["scale"]
    record = taken(Record(x, ["a", "b", "c"]))
    assert record.texts == ["c", "a"]
    other = taken(collections.OrderedDict(x=x))
    assert type(other) is collections.OrderedDict


def test_lists_of_samples_of_several_sizes():
    images = [torch.zeros(3, size, size) for size in (4, 5, 6)]
    found = taken((images, [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 3)]))
    assert [image.shape[1] for image in found[0]] == [6, 4]
    assert [len(one["boxes"]) for one in found[1]] == [3, 1]
    listed = taken([(torch.tensor(n), n) for n in range(3)])
    assert [n for _, n in listed] == [2, 0]


def test_two_fields_of_two_samples_are_fields():
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4])
    found = Rows.of([x, y], 2).take(np.array([1])).batch()
    assert [field.tolist() for field in found] == [[[2.0]], [4]]


def test_joined_samples_are_those_of_the_whole():
    batch = (torch.arange(5), ["a", "b", "c", "d", "e"], {"n": np.arange(5.0)})
    parts = [Rows.of(batch, 5).take(np.array(rows)) for rows in ([0, 3], [4], [1, 2])]
    x, texts, other = Rows.joined(parts).batch()
    assert x.tolist() == other["n"].tolist() == [0, 3, 4, 1, 2]
    assert "".join(texts) == "adebc"


def test_padded_to_other_lengths_is_refused():
    parts = [Rows.of(torch.zeros(2, length), 2) for length in (3, 4)]
    with pytest.raises(RowsError, match=r"\(3,\) torch.float32 and .*\(4,\).* Pad all samples .* mode='in_batch'"):
        Rows.joined(parts)


def test_batch_without_rows_is_refused():
    with pytest.raises(RowsError, match="no part of a batch of type dict has 3 rows"):
        Rows.of({"x": torch.zeros(4)}, 3)
    with pytest.raises(RowsError, match="a batch of type str holds no tensor"):
        samples_of("text")
