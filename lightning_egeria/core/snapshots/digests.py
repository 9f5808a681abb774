"""Digests of tensors, to recognise weights and rows later."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from lightning_egeria.core.network.sharding import is_distributed

GROUP_BYTES = 2**28  # that are gathered at a time to be compared
# That hold the bits of an element, by its bytes: two where there are 16.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
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


def sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the sum of the bits of each tensor, read as integers: a quick check that none has changed.

    They are computed where the tensors are, and read together. Of a tensor that is sharded over ranks, the part of this
    rank counts.

    >>> sums([torch.ones(2), torch.zeros(3)])
    [2130706432, 0]
    """
    found = []
    for tensor in tensors:
        # A DTensor has ``to_local``.
        own = tensor.detach().to_local() if is_distributed(tensor) else tensor.detach()  # type: ignore[attr-defined]
        flat = own.contiguous().reshape(-1).view(INTEGERS[own.element_size()])
        found.append(flat.sum(dtype=torch.int64).to(tensors[0].device))
    return [int(one) for one in torch.stack(found).tolist()] if found else []


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
    integers = INTEGERS[first.element_size()]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


def with_gaps(tensor: Tensor, most_bytes: int) -> Tensor:
    """Return a copy with the same strides, which decide what kernels round; a dense one if gaps take more bytes."""
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    if not plain or tensor.numel() == 0 or tensor.requires_grad:
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if is_dense(tensor) or span * tensor.element_size() > most_bytes:
        return tensor.clone()
    whole = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).clone()
    return whole.as_strided(tensor.shape, tensor.stride())


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether a change of one tensor in place may change the other.

    >>> whole = torch.zeros(4, 6)
    >>> overlap(whole, whole[:, 0]), overlap(*whole.chunk(2, 1)), overlap(whole, torch.zeros(4, 6))
    (True, False, False)
    """
    if not has_values(one) or not has_values(other):
        return one is other
    if not one.numel() or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.dtype != other.dtype:
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    shape = [size if stride else 1 for size, stride in zip(one.shape, one.stride(), strict=True)]
    taken.as_strided(shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def is_dense(tensor: Tensor) -> bool:
    """Whether its memory holds its values and nothing else, as they are.

    >>> is_dense(torch.zeros(2, 3).T), is_dense(torch.zeros(2, 3)[:, :2])
    (True, False)
    """
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor)) and not (tensor.is_conj() or tensor.is_neg())


class Copies:
    """Copies of tensors beside them, on a GPU say, where the values are compared later: all bits, in few kernels.

    >>> weight = torch.zeros(3)
    >>> copies = Copies([weight])
    >>> copies.agree()
    True
    >>> weight.data[2] = -0.0
    >>> copies.agree()
    False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        groups: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
        room: dict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
        for tensor in filter(is_dense, filled):
            kind = tensor.device, INTEGERS[tensor.element_size()]
            groups[*kind, room[kind] // GROUP_BYTES].append(tensor.as_strided((tensor.numel(),), (1,)).view(kind[1]))
            room[kind] += tensor.nbytes
        self._groups = [(views, torch.cat(views)) for views in groups.values()]
        self._scattered = [(tensor, tensor.clone()) for tensor in filled if not is_dense(tensor)]

    def agree(self) -> bool:
        """Whether no value has changed. It waits for the device."""
        return all(torch.equal(torch.cat(views), copy) for views, copy in self._groups) and all(
            same_bits(tensor, copy) for tensor, copy in self._scattered
        )


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
