"""Selected samples that wait."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_egeria.core.batches.rows import Rows
from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.methods.selecting.queue import SelectedSamples, SelectionQueue, joined, queued_rows


def piece(number, values):
    rows = np.arange(len(values))
    samples = Rows.of(torch.tensor(values), len(values)) if values else None
    return SelectedSamples(number, rows, tuple(values), samples, RandomState.current())


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 8))
def test_samples_leave_in_order_and_once(counts, size):
    queue, expected, found = SelectionQueue(), [], []
    for number, count in enumerate(counts):
        values = list(range(100 * number, 100 * number + count))
        expected += values
        queue.add(piece(number, values))
        while leaves := queue.next_size(size, is_end=False):
            assert leaves == size
            assert len(queue) > size
            found.append(joined(queue.pop(leaves)).tolist())
    rest = []
    while leaves := queue.next_size(size, is_end=True):
        rest.append(joined(queue.pop(leaves)).tolist())
    assert [value for batch in found + rest for value in batch] == expected
    assert all(len(batch) <= size for batch in rest)
    assert max(map(len, rest), default=0) - min(map(len, rest), default=0) <= max(1, len(rest))
    assert len(queue) == 0


@pytest.mark.parametrize(("waiting", "sizes"), [(1, [1]), (8, [8]), (9, [5, 4]), (17, [6, 6, 5])])
def test_rest_leaves_in_batches_of_one_size(waiting, sizes):
    queue = SelectionQueue()
    queue.add(piece(0, list(range(waiting))))
    found = []
    while size := queue.next_size(8, is_end=True):
        found.append(len(joined(queue.pop(size))))
    assert found == sizes


def test_state_says_where_samples_came_from():
    queue = SelectionQueue()
    queue.add(piece(3, [5, 6, 7]))
    queue.add(piece(4, []))
    torch.rand(1)
    queue.add(piece(5, [8]))
    queue.pop(1)
    waiting = queued_rows(queue.state_dict())
    assert {number: one.rows.tolist() for number, one in waiting.items()} == {3: [1, 2], 5: [0]}
    assert waiting[5].random == RandomState.current() != waiting[3].random
    queue.clear()
    assert len(queue) == 0
