"""Rows of batches."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_egeria.core.batches.rows import Rows, layout_of_both, layout_of_default, layout_of_two, samples_of
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
    with pytest.raises(RowsError, match=r"\(3,\) torch.float32; .*\(4,\).* Pad all samples .* mode='in_batch'"):
        Rows.joined(parts)


def test_batch_without_rows_is_refused():
    with pytest.raises(RowsError, match="no part of a batch of type dict has 3 rows"):
        Rows.of({"x": torch.zeros(4)}, 3)
    with pytest.raises(RowsError, match="a batch of type str has no tensor"):
        samples_of("text")


def test_lists_in_samples_are_columns_of_numbers():
    """As many numbers in each list as there are samples: torch makes a list of columns of them."""
    samples = [{"x": float(n), "box": [10 * n + at for at in range(4)], "text": f"{n}"} for n in range(4)]
    batch = default_collate(samples)
    found = Rows.of(batch, 4, layout_of_default(batch)).take(np.array([3, 1])).batch()
    assert [column.tolist() for column in found["box"]] == [[30, 10], [31, 11], [32, 12], [33, 13]]
    assert found["text"] == ["3", "1"]
    assert found["x"].tolist() == [3, 1]


def lists_and_masks(samples):
    """A list of images of one size each, and what all samples share, of as many rows as there are samples."""
    return {"images": [torch.full((4, 2), n) for n in samples], "mask": torch.ones(4, 4), "names": list("abcd")}


def test_two_batches_show_what_samples_share():
    batch = lists_and_masks([5, 6, 7, 8])
    layout = layout_of_two(batch, lists_and_masks([5, 6, 7]), 4)
    found = Rows.of(batch, 4, layout).take(np.array([2])).batch()
    assert [image[0, 0] for image in found["images"]] == [7]
    assert found["mask"].shape == (4, 4)
    assert found["names"] == list("abcd")


def test_a_size_that_changes_by_chance_is_none_of_samples():
    by_chance = layout_of_two((torch.ones(4), torch.ones(4, 4)), (torch.ones(3), torch.ones(3, 3)), 4)
    assert by_chance["/1"] == 0
    later = layout_of_two((torch.ones(4), torch.ones(9, 9)), (torch.ones(3), torch.ones(9, 9)), 4)
    assert layout_of_both(by_chance, later) == {"": None, "/0": 0, "/1": None}


def test_samples_in_another_dimension_are_refused():
    batch, fewer = (torch.ones(7, 4), torch.ones(4)), (torch.ones(7, 3), torch.ones(3))
    with pytest.raises(RowsError, match=r"in dimension 1 of a tensor of shape \(7, 4\)\. Let the collate function"):
        Rows.of(batch, 4, layout_of_two(batch, fewer, 4))


def test_a_column_has_a_row_for_each_sample():
    layout = Rows.of((torch.ones(4, 2), torch.ones(4)), 4).layout
    with pytest.raises(RowsError, match=r"of 4 samples has the size \[3, 2\], expected one row for each sample"):
        Rows.of((torch.ones(3, 2), torch.ones(4)), 4, layout)


@pytest.mark.parametrize("shared", [0.5, "b", torch.tensor([2.0]), np.arange(2), True])
def test_samples_of_other_shared_values_are_not_joined(shared):
    first, *others = (Rows.of((torch.ones(3), one), 3) for one in (None, shared, shared))
    assert Rows.joined(others).samples == 6
    with pytest.raises(RowsError, match="structure, shape or shared values differ"):
        Rows.joined([first, others[0]])


def test_parts_with_other_dimensions_are_no_samples():
    """As many parts as samples, one of them a number."""
    images, weight = torch.arange(4).reshape(2, 2), torch.tensor(7.0)
    taken, kept = Rows.of((images, weight), 2).take(np.array([1, 0, 1])).batch()
    assert taken.tolist() == [[2, 3], [0, 1], [2, 3]]
    assert kept is weight
