"""Rows of a batch: chosen samples of it, and samples of several batches joined to one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_egeria.core.batches.tree import parts_of, tensor_leaves, with_parts
from lightning_egeria.errors import RowsError

Index = NDArray[np.int64]
# The dimension of each part of a batch that is the samples, by its path; None: the samples share that part.
Layout = dict[str, int | None]


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
    raise RowsError(f"a batch of type {type(batch).__name__} has no tensor with one row for each sample")


class Rows:
    """Samples, taken apart into columns: what holds one value for each sample, and the structure around these.

    A column is a tensor or an array whose first dimension is the samples, or a list with one element a sample, such as
    texts or tensors of several sizes. All else is the same for the whole batch and stays in the structure. A `Layout`
    tells which is which; without one, what has as many rows or elements as there are samples is a column, and a list of
    columns of one shape is none.

    Args:
        structure: the batch with a mark in the place of each column.
        columns: the columns.
        samples: number of samples.
        layout: what is a column, as far as it was looked at.
    """

    def __init__(self, structure: Any, columns: list[Any], samples: int, layout: Layout | None = None) -> None:
        self.structure = structure
        self.columns = columns
        self.samples = samples
        self.layout: Layout = layout if layout is not None else {}

    @classmethod
    def of(cls, batch: Any, samples: int, layout: Layout | None = None) -> Rows:
        """Take a batch apart.

        Args:
            batch: any tree of tensors, arrays, lists, tuples, mappings and dataclasses.
            samples: number of its samples.
            layout: of an earlier batch, which holds for the parts that it names.

        Raises:
            RowsError: nothing in the batch has one value for each sample, or a column does not.

        >>> Rows.of((torch.arange(3), {"text": ["a", "b", "c"]}), 3).take(np.array([2, 0])).batch()
        (tensor([2, 0]), {'text': ['c', 'a']})
        """
        columns: list[Any] = []
        found: Layout = {}
        structure = _taken_apart(batch, samples, columns, layout or {}, found)
        if not columns:
            raise RowsError(
                f"no part of a batch of type {type(batch).__name__} has {samples} rows, expected tensors, arrays or "
                "lists with one row or element a sample"
            )
        return cls(structure, columns, samples, found)

    @property
    def form(self) -> str:
        """What samples must have in common to be joined, in words."""
        kinds = [
            f"{tuple(column.shape[1:])} {column.dtype}" if isinstance(column, (Tensor, np.ndarray)) else "list"
            for column in self.columns
        ]
        shared = hashlib.blake2b(digest_size=4)
        has_shared = _add_shared(self.structure, shared.update)
        of = f"{type(self.structure).__name__} of {', '.join(kinds)}"
        return f"{of} and shared values {shared.hexdigest()}" if has_shared else of

    def take(self, rows: Index) -> Rows:
        """Return some of the samples, in the order of ``rows``."""
        return Rows(self.structure, [_taken(column, rows) for column in self.columns], len(rows), self.layout)

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
        return Rows(first.structure, columns, sum(part.samples for part in parts), first.layout)


def check_forms(forms: Set[str]) -> None:
    """Find out whether samples of these forms can be joined.

    Raises:
        RowsError: there are several.
    """
    if len(forms) > 1:
        raise RowsError(
            "samples of several batches cannot be joined, because their structure, shape or shared values differ: "
            f"{'; '.join(sorted(forms)[:2])}. Pad all samples to one shape, or use mode='in_batch'"
        )


def layout_of_default(batch: Any) -> Layout:
    """Return the layout of a batch that torch's ``default_collate`` has made.

    It makes a tensor of everything but texts, and of the lists in samples it makes lists of tensors.

    >>> layout_of_default([torch.zeros(2, 3), [torch.zeros(2), torch.zeros(2)], ("a", "b")])
    {'': None, '/0': 0, '/1': None, '/1/0': 0, '/1/1': 0, '/2': 0}
    """
    found: Layout = {}

    def look(path: str, value: Any) -> None:
        is_text = type(value) in (list, tuple) and value and all(isinstance(part, (str, bytes)) for part in value)
        found[path] = 0 if is_text or (isinstance(value, (Tensor, np.ndarray)) and value.ndim) else None
        if not is_text:
            for key, part in parts_of(value) or ():
                look(f"{path}/{key}", part)

    look("", batch)
    return found


def layout_of_two(batch: Any, fewer: Any, samples: int) -> Layout:
    """Return the layout of a batch, from one without its first or last sample: a column has one row less there.

    Args:
        batch: of ``samples`` samples.
        fewer: the same without one.
        samples: at least 3.

    >>> layout_of_two((torch.zeros(3, 3), torch.zeros(3, 3)), (torch.zeros(2, 3), torch.zeros(3, 3)), 3)
    {'': None, '/0': 0, '/1': None}
    """
    found: Layout = {}

    def look(path: str, one: Any, other: Any) -> None:
        sizes = enumerate(zip(_sizes(one), _sizes(other), strict=False))
        found[path] = next((dim for dim, both in sizes if both == (samples, samples - 1)), None)
        if found[path] is None:
            parts, others = dict(parts_of(one) or ()), dict(parts_of(other) or ())
            for key, part in parts.items():
                if key in others:
                    look(f"{path}/{key}", part, others[key])

    look("", batch, fewer)
    return found


def layout_of_both(first: Layout, second: Layout) -> Layout:
    """Return what two layouts agree on.

    Padding may be one shorter without the longest sample, and look like the samples where it is as long as they are
    many. It does not without another sample.
    """
    return {path: where if second.get(path, where) == where else None for path, where in (second | first).items()}


def _taken_apart(value: Any, samples: int, columns: list[Any], known: Layout, found: Layout, path: str = "") -> Any:
    where = known[path] if path in known else 0 if _is_column(value, samples, not path) else None
    found[path] = where
    if where:
        raise RowsError(
            f"the samples of a batch are in dimension {where} of a tensor of shape {tuple(_sizes(value))}. Let the "
            "collate function put them first, and transpose it in the training step"
        )
    if where is not None:
        if _sizes(value)[:1] != [samples]:
            raise RowsError(
                f"a part of a batch of {samples} samples has the size {_sizes(value)}, expected one row for each sample"
            )
        columns.append(value)
        return _Column(len(columns) - 1)
    return _changed(value, lambda key, part: _taken_apart(part, samples, columns, known, found, f"{path}/{key}"))


def _is_column(value: Any, samples: int, is_root: bool) -> bool:
    if _sizes(value)[:1] != [samples]:
        return False
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    tensors = [part for part in value if isinstance(part, (Tensor, np.ndarray))]
    if len({len(_sizes(part)) for part in tensors}) > 1:
        return False  # samples have one number of dimensions: these are parts of a batch, such as images and a weight
    # Two tensors of two rows are columns; in a batch of two samples, they might also be two samples, of two sizes, say.
    of_one_shape = is_root or len({tuple(_sizes(part)) for part in value}) == 1
    return not (of_one_shape and all(_is_column(part, samples, False) for part in value))


def _sizes(value: Any) -> list[int]:
    """The shape of a tensor, the length of a list, and nothing of all else."""
    if isinstance(value, (Tensor, np.ndarray)):
        return list(value.shape)
    return [len(value)] if type(value) in (list, tuple) else []


def _add_shared(structure: Any, update: Callable[[bytes], None]) -> bool:
    """Add all values of a structure to a digest; return whether there are any."""
    if isinstance(structure, _Column):
        return False
    if parts := parts_of(structure):
        return sum(_add_shared(part, update) for _, part in parts) > 0  # of all, so no any()
    if type(structure) is Tensor and structure.layout is torch.strided:
        structure = structure.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(structure, np.ndarray) and structure.dtype != object:
        update(structure.tobytes())
        return True
    is_value = isinstance(structure, (bool, int, float, complex, str, bytes))
    update(repr(structure if is_value else type(structure)).encode())
    return is_value


def _changed(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """The container with its parts changed, each with its key in words; the value itself if it is none."""
    parts = parts_of(value)
    return value if parts is None else with_parts(value, [change(*one) for one in parts])


def _put_together(structure: Any, columns: list[Any]) -> Any:
    if isinstance(structure, _Column):
        return columns[structure.number]
    return _changed(structure, lambda _, part: _put_together(part, columns))


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
