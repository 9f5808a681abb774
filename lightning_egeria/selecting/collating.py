"""Whether a collate function keeps the order of the samples, so that the ids of the sampler are those of the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_egeria.batches.rows import Rows
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.snapshots.random_state import preserved_random_state

CHECKED_BATCHES = 2


class InOrder:
    """A collate function whose first batches are made a second time, from the samples in reverse.

    Args:
        collate: the user's collate function.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self._left = CHECKED_BATCHES

    def __call__(self, samples: list[Any]) -> Any:
        """Return the user's batch.

        Raises:
            UnsupportedError: its samples are in another order.
        """
        if not self._left or len(samples) < 2:
            return self.collate(samples)
        self._left -= 1
        backwards = copy.deepcopy(samples[::-1])
        batch = self.collate(samples)
        with preserved_random_state():
            other = self.collate(backwards)
        if _is_in_another_order(Rows.of(batch, len(samples)).columns, Rows.of(other, len(samples)).columns):
            raise UnsupportedError(
                "the collate function of the DataLoader changes the order of the samples, so stale losses would be "
                "those of other samples. Keep the order, or use staleness=0"
            )
        return batch


def _is_in_another_order(columns: Sequence[Any], backwards: Sequence[Any]) -> bool:
    """Whether a column has the same rows in both batches, and not in reverse. Rows drawn at random prove nothing."""
    for first, second in zip(columns, backwards, strict=False):
        rows, others = _rows(first), _rows(second)
        if len(set(rows)) == len(rows) and set(rows) == set(others) and others != rows[::-1]:
            return True
    return False


def _rows(column: Any) -> list[Any]:
    if isinstance(column, Tensor):
        column = column.detach().cpu().float().numpy()
    if isinstance(column, np.ndarray):
        return [np.ascontiguousarray(row).tobytes() for row in column]
    return [repr(one) for one in column]
