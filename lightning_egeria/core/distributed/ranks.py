"""What the processes of one job tell each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MESSAGE_BYTES = 512  # of the one broadcast of an evaluation step


@dataclasses.dataclass(frozen=True)
class DepthBroadcast:
    """The decision that rank 0 sends to the others.

    Attributes:
        depth: frozen depth from now on.
        next_in_steps: optimizer steps until the next broadcast.
        reason: why the depth changes; empty if it does not.
    """

    depth: int
    next_in_steps: int
    reason: str = ""

    def packed(self) -> bytes:
        """Return `MESSAGE_BYTES` bytes; cuts a reason that is too long.

        >>> message = DepthBroadcast(3, 50, "calm" * 1000)
        >>> len(message.packed()), DepthBroadcast.unpacked(message.packed()).depth
        (512, 3)
        """
        room = MESSAGE_BYTES - len(json.dumps([self.depth, self.next_in_steps, ""]))
        reason = self.reason.encode("ascii", "replace").decode()[:room]
        while len(json.dumps(reason)) - 2 > room:  # quotation marks and the like take two
            reason = reason[:-1]
        return json.dumps([self.depth, self.next_in_steps, reason]).encode().ljust(MESSAGE_BYTES)

    @classmethod
    def unpacked(cls, data: bytes) -> DepthBroadcast:
        """Return the message from the bytes of `packed`."""
        return cls(*json.loads(data))


class Ranks:
    """All processes of a job. Global rank 0 decides.

    Without `torch.distributed`, or with one process, this process decides and sends nothing. Every rank must make each
    call. Values travel as JSON, because what is unpickled may run code.

    Args:
        device: device from which the backend sends tensors.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None else torch.device("cpu")
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    @property
    def leads(self) -> bool:
        """Whether this process decides."""
        return self.rank == 0

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy a tensor of one rank into those of all others, in place, and return it: one broadcast."""
        if self.several:
            dist.broadcast(tensor, source)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape: one gathering."""
        if not self.several:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor)
        return found

    def data(self, data: bytes, source: int = 0) -> bytes:
        """Return the bytes of one rank on all: two broadcasts."""
        size = int(self.broadcast(torch.tensor(len(data), device=self._device), source))
        return _content(self.broadcast(self._padded(data, size), source), size)

    def share(self, value: Any, source: int = 0) -> Any:
        """Return the value of one rank on all: two broadcasts.

        Args:
            value: plain types of any size; ignored on every rank but ``source``.
            source: the rank.
        """
        if not self.several:
            return value
        return json.loads(self.data(json.dumps(value).encode() if self.rank == source else b"", source))

    def each(self, value: Any) -> list[Any]:
        """Return the value of each rank, on all ranks: two gatherings.

        Args:
            value: plain types of any size.
        """
        if not self.several:
            return [value]
        data = json.dumps(value).encode()
        sizes = [int(size) for size in self.gather(torch.tensor(len(data), device=self._device))]
        parts = self.gather(self._padded(data, max(sizes)))
        return [json.loads(_content(part, size)) for part, size in zip(parts, sizes, strict=True)]

    def agree(self, message: DepthBroadcast | None) -> DepthBroadcast:
        """Return rank 0's message on all ranks: one broadcast of `MESSAGE_BYTES` bytes.

        Args:
            message: the message to send; ignored on every rank but 0.
        """
        if not self.several:
            assert message is not None, "the rank that leads must give a message"
            return message
        data = message.packed() if message is not None and self.leads else b""
        return DepthBroadcast.unpacked(_content(self.broadcast(self._padded(data, MESSAGE_BYTES)), MESSAGE_BYTES))

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean of each value over all ranks, which give as many values: one reduction."""
        if not self.several:
            return list(values)
        total = torch.tensor(values, dtype=torch.float32, device=self._device)
        dist.all_reduce(total)
        return [float(value) for value in total / self.size]

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks: one reduction."""
        if not self.several:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of each value over all ranks, which give as many values: one reduction."""
        if not self.several:
            return list(values)
        smallest = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return [int(value) for value in smallest]

    def share_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers, such as running statistics, from rank 0 to all others: one broadcast.

        Args:
            buffers: buffers by name; changed in place on every rank but 0.
        """
        if not self.several or not buffers:
            return
        sent = self.broadcast(torch.cat([_bytes_of(buffer) for buffer in buffers.values()]).to(self._device))
        if not self.leads:
            pieces = sent.split([buffer.nbytes for buffer in buffers.values()])
            for buffer, data in zip(buffers.values(), pieces, strict=True):
                # Cloned, because a piece of the whole may begin where its dtype must not.
                buffer.copy_(data.clone().view(buffer.dtype).view(buffer.shape))

    def _padded(self, data: bytes, size: int) -> Tensor:
        """A tensor of ``size`` bytes, but never an empty one, which no backend sends."""
        return torch.frombuffer(bytearray(data[:size].ljust(max(1, size))), dtype=torch.uint8).to(self._device)


def _content(padded: Tensor, size: int) -> bytes:
    return padded[:size].cpu().numpy().tobytes()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
