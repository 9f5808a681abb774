"""Rows of a batch: chosen samples of it, and samples of several batches joined to one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.errors import RowsError

Index = NDArray[np.int64]


class _Column(NamedTuple):
    """Stands for a column in the structure of a batch."""

    number: int


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor.

    Raises:
        RowsError: there is no tensor with a dimension.

    >>> samples_of({"text": ["a", "b"], "length": torch.tensor([1, 1])})
    2
    """
    for leaf in tensor_leaves(batch):
        if leaf.ndim:
            return len(leaf)
    raise RowsError(f"a batch of type {type(batch).__name__} holds no tensor with one row a sample")


class Rows:
    """Samples, taken apart into columns: what holds one value a sample, and the structure around these.

    A column is a tensor or an array whose first dimension is the samples, or a list with one element a sample, such as
    texts or tensors of several sizes. All else is the same for the whole batch and stays in the structure.

    Args:
        structure: the batch with a mark in the place of each column.
        columns: the columns.
        samples: number of samples.
    """

    def __init__(self, structure: Any, columns: list[Any], samples: int) -> None:
        self.structure = structure
        self.columns = columns
        self.samples = samples

    @classmethod
    def of(cls, batch: Any, samples: int, forms: Set[str] = frozenset()) -> Rows:
        """Take a batch apart.

        Args:
            batch: any tree of tensors, arrays, lists, tuples, mappings and dataclasses.
            samples: number of its samples.
            forms: of other batches. They tell two tensors of a batch of two samples from a list of these samples.

        Raises:
            RowsError: nothing in the batch has one value a sample.

        >>> Rows.of((torch.arange(3), {"text": ["a", "b", "c"]}), 3).take(np.array([2, 0])).batch()
        (tensor([2, 0]), {'text': ['c', 'a']})
        """
        columns: list[Any] = []
        structure = _taken_apart(batch, samples, columns, True)
        if forms and (rows := cls(structure, columns, samples)).form not in forms:
            others: list[Any] = []
            other = cls(_taken_apart(batch, samples, others, True, apart=True), others, samples)
            return other if other.form in forms else rows
        if not columns:
            raise RowsError(
                f"no part of a batch of type {type(batch).__name__} has {samples} rows, expected tensors, arrays or "
                "lists with one row or element a sample"
            )
        return cls(structure, columns, samples)

    @property
    def form(self) -> str:
        """What samples must have in common to be joined, in words."""
        kinds = [
            f"{tuple(column.shape[1:])} {column.dtype}" if isinstance(column, (Tensor, np.ndarray)) else "list"
            for column in self.columns
        ]
        return f"{type(self.structure).__name__} of {', '.join(kinds)}"

    def take(self, rows: Index) -> Rows:
        """Return some of the samples, in the order of ``rows``."""
        return Rows(self.structure, [_taken(column, rows) for column in self.columns], len(rows))

    def batch(self) -> Any:
        """Return the samples as a batch."""
        return _put_together(self.structure, self.columns)

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Join the samples of several batches of one structure.

        Raises:
            RowsError: they differ in structure, or their tensors in shape.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        check_forms({part.form for part in parts})
        columns = [_joined(columns) for columns in zip(*(part.columns for part in parts), strict=True)]
        return Rows(first.structure, columns, sum(part.samples for part in parts))


def check_forms(forms: Set[str]) -> None:
    """Find out whether samples of these forms can be joined.

    Raises:
        RowsError: there are several.
    """
    if len(forms) > 1:
        raise RowsError(
            f"samples of several batches cannot be joined, because their structure or shape differs: "
            f"{' and '.join(sorted(forms)[:2])}. Pad all samples to one shape, or use mode='in_batch'"
        )


def _taken_apart(value: Any, samples: int, columns: list[Any], is_root: bool, apart: bool = False) -> Any:
    holds_columns = apart and any(leaf.ndim and len(leaf) == samples for leaf in tensor_leaves(value))
    if _is_column(value, samples, is_root) and (isinstance(value, Tensor) or not holds_columns):
        columns.append(value)
        return _Column(len(columns) - 1)
    return _changed(value, lambda part: _taken_apart(part, samples, columns, False, apart))


def _is_column(value: Any, samples: int, is_root: bool) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0 and len(value) == samples
    if type(value) not in (list, tuple) or len(value) != samples or not value:
        return False
    # Two tensors of two rows are columns; in a batch of two samples, they might also be two samples.
    return not (is_root and all(_is_column(part, samples, False) for part in value))


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The container with its parts changed; the value itself if it is none."""
    if isinstance(value, Mapping):
        changed = {key: change(part) for key, part in value.items()}
        if type(value) is dict:
            return changed
        copied: Any = copy.copy(value)
        for key, part in changed.items():
            copied[key] = part
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, change(getattr(value, field.name)))
        return copied
    return value


def _put_together(structure: Any, columns: list[Any]) -> Any:
    if isinstance(structure, _Column):
        return columns[structure.number]
    return _changed(structure, lambda part: _put_together(part, columns))


def _taken(column: Any, rows: Index) -> Any:
    if isinstance(column, Tensor):
        return column.index_select(0, torch.from_numpy(rows).to(column.device))  # of a lazy tensor, lazy
    if isinstance(column, np.ndarray):
        return column[rows]
    return type(column)(column[row] for row in rows.tolist())


def _joined(columns: tuple[Any, ...]) -> Any:
    if isinstance(columns[0], Tensor):
        return torch.cat(columns)
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return type(columns[0])(element for column in columns for element in column)
