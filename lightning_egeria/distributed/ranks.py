"""The processes of one job: rank 0 decides what freezes, and all ranks freeze after the same step."""

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
    """All processes that train one model. Global rank 0 decides.

    Without `torch.distributed`, or with one process, this process decides and sends nothing.

    Args:
        device: device from which the backend sends tensors.

    Attributes:
        leads: whether this process decides.
        several: whether there are other processes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None else torch.device("cpu")
        joined = dist.is_available() and dist.is_initialized()
        self.several = joined and dist.get_world_size() > 1
        self.leads = not self.several or dist.get_rank() == 0

    def agree(self, message: DepthBroadcast | None) -> DepthBroadcast:
        """Return rank 0's message on all ranks: one broadcast of `MESSAGE_BYTES` bytes. Every rank must call it.

        Args:
            message: the message to send; ignored on every rank but 0.
        """
        if not self.several:
            assert message is not None, "the rank that leads must give a message"
            return message
        data = message.packed() if message is not None and self.leads else bytes(MESSAGE_BYTES)
        return DepthBroadcast.unpacked(self._broadcast(data))

    def share(self, value: Any) -> Any:
        """Return rank 0's value on all ranks: two broadcasts. Every rank must call it.

        Args:
            value: plain types of any size; ignored on every rank but 0.
        """
        if not self.several:
            return value
        data = json.dumps(value).encode() if self.leads else b""
        size = int.from_bytes(self._broadcast(len(data).to_bytes(8, "little")), "little")
        return json.loads(self._broadcast(data if self.leads else bytes(size)))

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean of each value over all ranks: one reduction. Every rank must call it with as many values."""
        if not self.several:
            return list(values)
        total = torch.tensor(values, dtype=torch.float32, device=self._device)
        dist.all_reduce(total)
        return [float(value) for value in total / dist.get_world_size()]

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks: one reduction. Every rank must call it."""
        if not self.several:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of each value over all ranks: one reduction. Every rank must give as many values."""
        if not self.several:
            return list(values)
        smallest = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return [int(value) for value in smallest]

    def each(self, value: Any) -> list[Any]:
        """Return the value of each rank, on all ranks. Every rank must call it.

        Args:
            value: plain types of any size.
        """
        if not self.several:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self._device))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [json.loads(bytes(part[: int(n)].cpu().numpy())) for part, n in zip(parts, sizes, strict=True)]

    def share_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers, such as running statistics, from rank 0 to all others: one broadcast. Every rank must call it.

        Args:
            buffers: buffers by name; changed in place on every rank but 0.
        """
        if not self.several or not buffers:
            return
        sent = torch.cat([_bytes_of(buffer) for buffer in buffers.values()]).to(self._device)
        dist.broadcast(sent, 0)
        if not self.leads:
            pieces = sent.split([buffer.nbytes for buffer in buffers.values()])
            for buffer, data in zip(buffers.values(), pieces, strict=True):
                # Cloned, because a piece of the whole may begin where its dtype must not.
                buffer.copy_(data.clone().view(buffer.dtype).view(buffer.shape))

    def _broadcast(self, data: bytes) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        dist.broadcast(tensor, 0)
        return bytes(tensor.cpu().numpy())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
