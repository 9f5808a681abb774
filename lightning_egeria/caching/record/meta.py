"""What is known of a tensor without its values."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

MOST_BYTES = 2**22  # of a tensor that may be copied in each step


class Meta(NamedTuple):
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return the shape, strides, dtype and device of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor like this one, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


@functools.lru_cache
def stacked(meta: Meta, count: int) -> Meta:
    """Return what `torch.stack` makes of ``count`` such tensors."""
    return Meta.of(torch.stack([meta.empty("meta")] * count))._replace(device=meta.device)


def version_of(tensor: Tensor) -> int:
    """Return the counter that rises with each change in place; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor may be copied in each step."""
    return tensor.numel() * tensor.element_size() <= MOST_BYTES
