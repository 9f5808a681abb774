"""The processes of a pipeline: what one tells all, and what all tell one another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_egeria.pipelining.messages import lost_connection


class Processes:
    """All processes of a job; one alone, without `torch.distributed`. Every process must make each call.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self._groups: dict[tuple[int, ...], Any] = {}

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of some ranks, which all processes make together at the first call."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks))
        return self._groups[ranks]

    def shared(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of one rank on all; it is written into ``tensor``."""
        if self.several:
            with lost_connection("another rank"):
                dist.broadcast(tensor, source)
        return tensor

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; they have one shape."""
        if not self.several:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with lost_connection("another rank"):
            dist.all_gather(found, tensor)
        return found

    def text(self, text: str, source: int = 0) -> str:
        """Return the text of one rank on all.

        >>> Processes().text("plan")
        'plan'
        """
        return self.data(text.encode(), source).decode()

    def data(self, data: bytes, source: int = 0) -> bytes:
        """Return the bytes of one rank on all."""
        size = int(self.shared(torch.tensor(len(data)), source))
        return bytes(self.shared(_bytes(data, size), source)[:size].numpy())

    def texts(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        data = text.encode()
        sizes = [int(size) for size in self.gathered(torch.tensor(len(data)))]
        found = self.gathered(_bytes(data, max(sizes)))
        return [bytes(one[:size].numpy()).decode() for one, size in zip(found, sizes, strict=True)]


def _bytes(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data[:size].ljust(max(1, size))), dtype=torch.uint8)
