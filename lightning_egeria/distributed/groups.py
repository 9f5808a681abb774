"""Collectives among some of the ranks of a job, over process groups that are made once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

MOST_GROUPS = 256  # each has its own connections, and on GPUs its own communicator


class Pending(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Wait for its end; on a GPU, let the current stream wait.

        Raises:
            RuntimeError: if it failed.
        """


class RankGroups:
    """Runs collectives among some of the ranks. There are `MOST_GROUPS` groups at most: more replace them all.

    Args:
        timeout: of each collective; None takes that of the job.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Any] = {}  # of ranks that this one is not among: a placeholder
        self._everyone: Any = None  # all ranks, for broadcasts

    def ensure(self, sets: Iterable[Collection[int]]) -> None:
        """Make the process groups that are not there yet. Every rank must call it with the same sets.

        Args:
            sets: ranks of each group. One rank alone, and all of them, need no group.
        """
        wanted = {tuple(sorted(ranks)) for ranks in sets if 1 < len(ranks) < self.size}
        if len(wanted | self._groups.keys()) > MOST_GROUPS:
            self.close()
        if self._everyone is None:
            self._everyone = dist.new_group(list(range(self.size)), timeout=self._timeout)
        for ranks in sorted(wanted - self._groups.keys()):
            self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def start_sum(self, tensor: Tensor, ranks: Collection[int]) -> Pending:
        """Start to sum a tensor over some ranks, in place. Each of them must call it.

        Args:
            tensor: contiguous, of one shape on all ranks.
            ranks: at least two ranks, with this one.
        """
        return _pending(dist.all_reduce(tensor, group=self._group(ranks), async_op=True))

    def start_broadcast(self, tensor: Tensor, root: int, ranks: Collection[int]) -> Pending:
        """Start to copy a tensor from the rank ``root`` to some ranks, in place. Each of them must call it.

        Broadcasts to all ranks have a group of their own, so their order among the sums is free.
        """
        group = self._group(ranks) if len(ranks) < self.size else self._everyone
        return _pending(dist.broadcast(tensor, root, group=group, async_op=True))

    def close(self) -> None:
        """Drop the groups. Safe to call twice."""
        groups = [*self._groups.values(), self._everyone]
        self._groups, self._everyone = {}, None
        for group in groups:
            if isinstance(group, dist.ProcessGroup) and dist.is_initialized():
                dist.destroy_process_group(group)

    def _group(self, ranks: Collection[int]) -> Any:
        return self._groups[tuple(sorted(ranks))] if len(ranks) < self.size else None


def _pending(work: Pending | None) -> Pending:
    assert work is not None  # this rank is one of the group
    return work
