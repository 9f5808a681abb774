"""Splitting a batch into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_egeria.core.batches.rows import Rows, samples_of
from lightning_egeria.errors import RowsError, UnsupportedError


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Split a batch into micro-batches: tensors, arrays and lists with as many samples as its first tensor.

    The first parts have one sample more where the batch does not divide; a batch of fewer samples has fewer parts.

    Returns:
        Micro-batches, and the share of each in the samples.

    Raises:
        UnsupportedError: if the batch has no tensor with samples.

    >>> import torch
    >>> [part for part, share in split({"x": torch.arange(5), "text": list("abcde")}, 2)]
    [{'x': tensor([0, 1, 2]), 'text': ['a', 'b', 'c']}, {'x': tensor([3, 4]), 'text': ['d', 'e']}]
    """
    try:
        samples = samples_of(batch)
        rows = Rows.of(batch, samples)
    except RowsError as error:
        raise UnsupportedError(f"the batch cannot be split into micro-batches: {error}") from error
    if not samples:
        raise UnsupportedError("the batch has no samples, and cannot be split into micro-batches")
    places = np.array_split(np.arange(samples), min(parts, samples))
    return [(rows.take(place).batch(), len(place) / samples) for place in places]
