"""What is asked of a collate function beside its batch: whether the order is kept, and the samples themselves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_egeria.core.batches.rows import Layout, Rows, layout_of_both, layout_of_two
from lightning_egeria.core.snapshots.random_state import preserved_random_state
from lightning_egeria.errors import UnsupportedError

CHECKED_BATCHES = 2
FEWEST = 3  # samples that show an order: two in reverse are also two moved on by one


class InOrder:
    """A collate function whose first batches are made a second time, with the first sample behind the others.

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
        if not self._left or len(samples) < FEWEST:
            return self.collate(samples)
        self._left -= 1
        batch, in_order, _ = _checked(self.collate, samples)
        if not in_order:
            raise UnsupportedError(
                "the collate function of the DataLoader changes the order of the samples, so a stale loss would "
                "belong to another sample. Keep the order, or use staleness=0"
            )
        return batch


@dataclasses.dataclass
class Collated:
    """A batch with the samples that it was made of.

    Attributes:
        batch: the user's batch.
        samples: the samples; None if they were not kept.
        in_order: whether its rows have the order of the samples, as far as is known.
        layout: what its columns are; None if that was not looked at.
    """

    batch: Any
    samples: list[Any] | None
    in_order: bool
    layout: Layout | None = None

    def pin_memory(self, device: Any = None) -> Collated:
        """Pin the batch, as the DataLoader asks."""
        self.batch = pin_memory(self.batch, device)
        return self


class WithSamples:
    """A collate function that returns ids and layout with its batch, and the samples if some are collated again.

    The cache's `PlannedDataset` has samples too, but without the inputs that it does not load, so it keeps its own.

    Args:
        collate: the user's collate function.
        keeps: a tensor in shared memory: whether samples are handed on. It tells workers that run already, and becomes
            true here where batches are seen to be padded.
        joins: whether samples of several batches are joined, so that padding matters.
        looks: whether the first batches are made once more without a sample, to learn what the columns are.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], keeps: Tensor, joins: bool, looks: bool) -> None:
        self.collate, self._keeps, self._joins, self._looks = collate, keeps, joins, looks
        self._left, self._in_order = CHECKED_BATCHES, True

    def __call__(self, samples: list[Any]) -> Collated:
        """Return the user's batch and more."""
        is_first = self._left > 0 and len(samples) >= FEWEST
        self._left -= is_first
        is_checked = is_first and self._joins and (bool(self._keeps) or len({*map(_form, samples)}) > 1)
        if is_checked and _depends_on_others(self.collate, samples):
            self._keeps.fill_(True)
        kept = copy.deepcopy(samples) if self._keeps else None  # collating may change them
        layout = None
        if is_checked:
            batch, in_order, layout = _checked(self.collate, samples)
            self._in_order &= in_order
        elif is_first and self._looks:
            again = copy.deepcopy(samples)
            batch = self.collate(samples)
            layout = _layout(self.collate, batch, again)
        else:
            batch = self.collate(samples)
        return Collated(batch, kept if self._in_order else None, self._in_order, layout)


def _layout(collate: Callable[[list[Any]], Any], batch: Any, samples: list[Any]) -> Layout | None:
    """The columns of a batch, which is made without its last and its first sample; None if that is not possible."""
    with preserved_random_state(), contextlib.suppress(Exception):  # whatever the collate function raises
        without_last, without_first = collate(copy.deepcopy(samples[:-1])), collate(samples[1:])
        layouts = (layout_of_two(batch, fewer, len(samples)) for fewer in (without_last, without_first))
        return layout_of_both(*layouts)
    return None


def _depends_on_others(collate: Callable[[list[Any]], Any], samples: list[Any]) -> bool:
    """Whether samples alone have several shapes, so each batch is padded to its longest."""
    with preserved_random_state(), contextlib.suppress(Exception):  # a collate function may want several samples
        return len({Rows.of(collate([copy.deepcopy(sample)]), 1).form for sample in samples}) > 1
    return False


def _form(sample: Any) -> Any:
    """What samples have in common that are not padded: shapes of tensors and arrays, lengths of texts and lists."""
    if isinstance(sample, (Tensor, np.ndarray)):
        return tuple(sample.shape)
    if isinstance(sample, Mapping):
        return tuple((key, _form(value)) for key, value in sample.items())
    if isinstance(sample, (list, tuple)) and not (sample and isinstance(sample[0], int)):
        return tuple(map(_form, sample))
    if dataclasses.is_dataclass(sample):
        return tuple(_form(getattr(sample, field.name)) for field in dataclasses.fields(sample))
    return len(sample) if isinstance(sample, (list, tuple, str, bytes)) else None


def _checked(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, bool, Layout | None]:
    """The user's batch, whether its rows have the order of the samples, and its columns as `_layout` finds them."""
    moved_on, again = copy.deepcopy(samples[1:] + samples[:1]), copy.deepcopy(samples)
    batch = collate(samples)
    with preserved_random_state():
        other = collate(moved_on)
    layout = _layout(collate, batch, again)
    first, second = (Rows.of(one, len(samples), layout).columns for one in (batch, other))
    return batch, not _is_in_another_order(first, second), layout


def _is_in_another_order(columns: Sequence[Any], moved_on: Sequence[Any]) -> bool:
    """Whether a column has the same rows in both batches, and not one further. Rows drawn at random prove nothing."""
    for first, second in zip(columns, moved_on, strict=False):
        rows, others = _rows(first), _rows(second)
        if len(set(rows)) == len(rows) and set(rows) == set(others) and others != rows[1:] + rows[:1]:
            return True
    return False


def _rows(column: Any) -> list[Any]:
    if isinstance(column, Tensor):
        column = column.detach().cpu().float().numpy()
    if isinstance(column, np.ndarray):
        return [np.ascontiguousarray(row).tobytes() for row in column]
    return [repr(one) for one in column]
