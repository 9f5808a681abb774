"""Where the time of a training batch goes: waiting for data, forward, backward, communication, the rest."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria.core.profiling.clock import mark, reached, seconds_between, wait_for

Mark = float | torch.cuda.Event


@dataclasses.dataclass(frozen=True)
class BatchPhases:
    """Seconds of one training batch by phase.

    Attributes:
        step: number of optimizer steps after the batch.
        depth: frozen depth during the batch.
        data: waiting for the batch.
        forward: from the arrival of the batch to the loss.
        backward: from the loss to the last gradient, without ``communication``.
        communication: waiting for other processes, where the backward did not hide it.
        rest: the optimizer, logging, other callbacks.
    """

    step: int
    depth: int
    data: float
    forward: float
    backward: float
    communication: float
    rest: float


@dataclasses.dataclass(frozen=True)
class TimedBatch:
    """A batch that the device has completed.

    Attributes:
        phases: seconds by phase.
        seconds: from the moment training was ready for the batch to its end, on the clock of the device. Where a GPU
            works while the host waits for data, it is less than the sum of the phases.
        label: what the caller of `PhaseTimer.batch_end` gave.
    """

    phases: BatchPhases
    seconds: float
    label: Any


@dataclasses.dataclass
class _Batch:
    depth: int
    waited: float
    ready: Mark
    began: Mark
    forward_ended: Mark | None = None
    backward_ended: Mark | None = None
    ended: Mark | None = None
    step: int = 0
    communication: float = 0.0
    label: Any = None

    def completed(self, wait: bool) -> bool:
        if wait and self.ended is not None:
            wait_for(self.ended)
        return self.ended is not None and reached(self.ended)

    def timed(self) -> TimedBatch | None:
        if self.forward_ended is None or self.backward_ended is None or self.ended is None:
            return None
        behind = seconds_between(self.forward_ended, self.backward_ended)
        communication = min(self.communication, behind)
        phases = BatchPhases(
            self.step,
            self.depth,
            data=self.waited,
            forward=seconds_between(self.began, self.forward_ended),
            backward=behind - communication,
            communication=communication,
            rest=seconds_between(self.backward_ended, self.ended),
        )
        return TimedBatch(phases, seconds_between(self.ready, self.ended), self.label)


class PhaseTimer:
    """Times the phases of training batches on the device that runs them, without waiting for it.

    Call `batch_start`, `forward_end`, `backward_end` and `batch_end` when training reaches these moments. Several
    backwards of a batch count as one. A batch without a backward does not count.

    >>> timer = PhaseTimer(torch.device("cpu"))
    >>> timer.batch_start(depth=2)
    >>> timer.forward_end(), timer.backward_end(), timer.batch_end(step=1)
    (None, None, None)
    >>> [(batch.step, batch.depth) for batch in timer.finished()]
    [(1, 2)]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch: _Batch | None = None
        self._unread: deque[_Batch] = deque()
        self.ready()

    def batch_start(self, depth: int) -> None:
        """A batch has arrived; ``depth`` layer modules are frozen."""
        self._batch = _Batch(depth, time.perf_counter() - self._ready, self._ready_mark, mark(self._device))

    def forward_end(self) -> None:
        """The loss is computed."""
        if self._batch is not None and self._batch.forward_ended is None:
            self._batch.forward_ended = mark(self._device)

    def backward_end(self) -> None:
        """The gradients are computed."""
        if self._batch is not None:
            self._batch.backward_ended = mark(self._device)

    def batch_end(self, step: int, communication: float = 0.0, label: Any = None) -> None:
        """The batch is over.

        Args:
            step: number of optimizer steps so far.
            communication: seconds that the backward waited for other processes.
            label: comes back with the times, which a GPU has later.
        """
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.label = label
            batch.step, batch.communication, batch.ended = step, communication, mark(self._device)
            self._unread.append(batch)

    def ready(self) -> None:
        """Training is ready for the next batch and starts waiting for data."""
        self._ready_mark = mark(self._device)
        self._ready = time.perf_counter()

    def finished(self, wait: bool = False) -> Iterator[BatchPhases]:
        """Yield the batches that the device has completed since the last call, oldest first.

        Args:
            wait: wait for the device to complete all of them.
        """
        return (batch.phases for batch in self.timed(wait))

    def timed(self, wait: bool = False) -> Iterator[TimedBatch]:
        """As `finished`, with the whole time and the label of each batch."""
        while self._unread and self._unread[0].completed(wait):
            batch = self._unread.popleft().timed()
            if batch is not None:
                yield batch


def exposed_communication(model: nn.Module | None) -> float:
    """Return seconds per backward that DDP waited for other processes, from its sampled timings; 0 without DDP."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    measured = model._get_ddp_logging_data()
    hidden = measured.get("avg_backward_compute_comm_overlap_time", 0)
    return float(max(0, measured.get("avg_backward_comm_time", 0) - hidden)) / 1e9
