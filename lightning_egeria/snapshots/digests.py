"""Digests of tensors, to recognise weights and rows later."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from lightning_egeria.network.sharding import is_distributed

SHARE_BYTES = 2**22  # of a thread, at least: fewer are read before a thread has started


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


def has_values(tensor: Tensor) -> bool:
    """Whether its values can be copied, compared and made bytes of: it is not sparse, quantised, nested or on "meta".

    >>> has_values(torch.zeros(2)), has_values(torch.zeros(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def same_bits(first: Tensor | None, second: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals NaN."""
    if first is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.dtype.is_floating_point:
        return torch.equal(first, second)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


def divided(memory: Sequence[memoryview], threads: int) -> list[list[memoryview]]:
    """Return a share of some memory for each thread, of about as many bytes, and of `SHARE_BYTES` at least.

    >>> [[len(part) for part in share] for share in divided([memoryview(bytes(9 * 2**20)), memoryview(b"ab")], 2)]
    [[4718593], [4718591, 2]]
    """
    total = sum(part.nbytes for part in memory)
    size = -(-total // max(1, min(threads, total // SHARE_BYTES)))
    shares, room = list[list[memoryview]]([[]]), size
    for part in memory:
        while part.nbytes > room:
            shares[-1].append(part[:room])
            part, room = part[room:], size
            shares.append([])
        shares[-1].append(part)
        room -= part.nbytes
    return shares


def checksums(shares: Sequence[Sequence[memoryview]]) -> list[int]:
    """Return a checksum of each share, which are read at the same time."""
    if len(shares) == 1:
        return [_checksum(shares[0])]
    with ThreadPoolExecutor(len(shares)) as pool:  # starts no thread before there is work
        others = [pool.submit(_checksum, share) for share in shares[1:]]
        return [_checksum(shares[0]), *(other.result() for other in others)]


def _checksum(share: Sequence[memoryview]) -> int:
    state = xxhash.xxh3_64()
    for part in share:
        state.update(part)
    return state.intdigest()
