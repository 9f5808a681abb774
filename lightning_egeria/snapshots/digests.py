"""Digests of tensors, to recognise weights and rows later."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_egeria.network.sharding import is_distributed


def digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a digest of names, dtypes, shapes and values; 16 bytes.

    Args:
        tensors: tensors by name, of any strided layout. A tensor sharded over ranks contributes only its name.

    >>> layer = torch.nn.Linear(2, 2)
    >>> before = digest(dict(layer.named_parameters()))
    >>> before == digest(dict(layer.named_parameters()))
    True
    >>> layer.bias.data[0] += 1
    >>> before == digest(dict(layer.named_parameters()))
    False
    """
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        state.update(name.encode() + b"\0")
        if not is_distributed(tensor):
            state.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(bytes_of(tensor))
    return state.digest()


def bytes_of(tensor: Tensor) -> bytes:
    r"""Return the values of a tensor, row by row, in host memory.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T)
    b'\x01\x03\x02\x04'
    """
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 1:  # which counts as contiguous whatever its stride
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same_bits(first: Tensor | None, second: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals NaN."""
    if first is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.dtype.is_floating_point:
        return torch.equal(first, second)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))
