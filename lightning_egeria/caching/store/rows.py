"""Activations as rows of a store: in memory order, and in fewer bits on request."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Precision = Literal["bf16", "int8"]
Rows = npt.NDArray[np.int64]  # numbers of rows, or of entries
Flags = npt.NDArray[np.bool_]  # one for each of them
LARGEST_STEP = 1 / 64  # between two values that come back, as a share of the largest
_LEAST_EXPONENT = -126  # of a normal float32
_EIGHT_BITS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class RowForm:
    """What a batch of activations looks like in memory, so that it can be put back, strides included.

    Without a precision it comes back bit for bit.

    Attributes:
        shape: of a row, which is the activation of one sample, in memory order.
        order: dimensions of the batch from the slowest to the fastest in memory.
        dtype: of the values.
        precision: ``"bf16"``, or ``"int8"`` with a power of two as the scale of each channel of each sample; None
            stores the values as they are.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    precision: Precision | None = None

    @classmethod
    def of(cls, batch: Tensor, precision: Precision | None = None) -> RowForm:
        """The form of ``batch``: ``[samples, ...]``.

        >>> RowForm.of(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)).shape
        (4, 5, 3)
        """
        strides = batch.stride()
        order = (0, *sorted(range(1, batch.ndim), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(batch.shape[dim] for dim in order[1:]), order, batch.dtype, precision=precision)

    def fits(self, batch: Tensor) -> bool:
        """Whether rows of a batch can be stored in this form."""
        return RowForm.of(batch, self.precision) == self and (self._kind != "int8" or bool(batch.isfinite().all()))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of a row in the store."""
        if self._kind != "int8":
            return self.shape
        channels = self.shape[self._channel] if self._channel is not None else 1
        return channels, math.prod(self.shape) // channels + 1

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the values in the store."""
        return {None: self.dtype, "bf16": torch.bfloat16, "int8": torch.int8}[self._kind]

    @property
    def row_bytes(self) -> int:
        """Of one row in the store."""
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize

    @property
    def rounds(self) -> bool:
        """Whether other values come back than were stored."""
        return self._kind is not None

    def to_memory(self, batch: Tensor) -> Tensor:
        """The rows of ``batch`` as they are stored, contiguous; `from_memory` is the inverse."""
        rows = batch.permute(self.order).contiguous()
        if self._kind == "int8":
            return _in_eight_bits(self._by_channel(rows))
        return rows.to(self.stored_dtype)

    def from_memory(self, rows: Tensor) -> Tensor:
        """A batch with the strides of the original."""
        if self._kind != "int8":
            return self._in_order(rows.to(self.dtype))
        if self._channel is None:
            return self._in_order(_from_eight_bits(rows, self.dtype).reshape(len(rows), *self.shape))
        rest = self.shape[: self._channel] + self.shape[self._channel + 1 :]
        values = _from_eight_bits(rows, self.dtype).reshape(*rows.shape[:2], *rest)
        return self._in_order(values.movedim(1, 1 + self._channel).contiguous())

    def rounded(self, batch: Tensor) -> Tensor:
        """Return what comes back of a batch; the batch itself if that is the same, or cannot be stored.

        Rounding twice is rounding once.

        >>> form = RowForm.of(torch.empty(1, 2, 3), "int8")
        >>> form.rounded(torch.tensor([[[1.0, 0.5, 0.25], [100.0, 50.3, 0.0]]])).tolist()
        [[[1.0, 0.5, 0.25], [100.0, 50.0, 0.0]]]
        """
        return self.from_memory(self.to_memory(batch)) if self.rounds and self.fits(batch) else batch

    def empty(self, samples: int, device: torch.device) -> Tensor:
        """Return a batch of any values."""
        return self._in_order(torch.empty((samples, *self.shape), dtype=self.dtype, device=device))

    @property
    def _kind(self) -> Precision | None:
        """The precision, if it makes a difference for these values."""
        if self.precision == "int8":
            return "int8" if self.dtype in _EIGHT_BITS and 0 not in self.shape else None
        return self.precision if self.dtype in (torch.float32, torch.float64) else None

    @property
    def _channel(self) -> int | None:
        """Number of the channel's dimension in a row; None if a row is a vector, or a number."""
        return self.order.index(1) - 1 if len(self.shape) > 1 else None

    def _by_channel(self, rows: Tensor) -> Tensor:
        if self._channel is None:
            return rows.reshape(len(rows), 1, -1)
        return rows.movedim(1 + self._channel, 1).flatten(2)

    def _in_order(self, rows: Tensor) -> Tensor:
        inverse = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
        return rows.permute(inverse)


def laid_out(rows: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return rows in memory as the network lays out its batch: kernels may give other last bits for other strides.

    Args:
        rows: all rows of a batch, or some.
        shape: of the whole batch.
        stride: of the whole batch.

    >>> laid_out(torch.zeros(2, 3), (2, 3), (1, 2)).stride()
    (1, 2)
    """
    if rows.shape != shape:  # some rows
        order = sorted(range(rows.ndim), key=lambda dim: -stride[dim])
        laid = torch.empty_permuted(rows.shape, order, dtype=rows.dtype, device=rows.device)
        return rows if rows.stride() == laid.stride() else laid.copy_(rows)
    if rows.stride() == stride:
        return rows
    laid = torch.empty_strided(shape, stride, dtype=rows.dtype, device=rows.device)
    first = tuple(slice(None) if step else slice(1) for step in stride)  # an expanded dimension has one value
    try:
        laid[first].copy_(rows[first])
    except RuntimeError:  # rows share memory
        return rows
    return laid


def _in_eight_bits(values: Tensor) -> Tensor:
    """Round finite values, ``[samples, channels, values]``, to -127 ... 127 times a power of two, which comes last.

    The scale is the smallest with which the largest value fits, so it is found again in what was rounded.
    """
    values = values.float()
    mantissa, exponent = torch.frexp(values.abs().amax(2, keepdim=True))
    exponent = (exponent - torch.where(mantissa <= 127 / 128, 7, 6)).clamp(min=_LEAST_EXPONENT)
    numbers = torch.ldexp(values, -exponent).round()
    return torch.cat([numbers, exponent], 2).to(torch.int8)


def _from_eight_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return torch.ldexp(rows[..., :-1].float(), rows[..., -1:].float()).clamp(-largest, largest).to(dtype)
