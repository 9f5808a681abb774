"""Queues of gangs: first come first served, with back-fill, and shortest remaining time first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, take_emptiest
from lightning_egeria.errors import ArgumentError


class FirstComeFirstServed:
    """Starts jobs in the order of arrival. A job that does not fit holds up all behind it; none is stopped."""

    name = "fcfs"
    adapts_batch_size = False

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`."""
        allocations = dict(current)
        free = cluster.free(allocations)
        for job in jobs:
            if job.name in allocations:
                continue
            if job.gang > sum(free):
                break
            allocations[job.name] = take_emptiest(free, job.gang)
        return allocations


class BackFill:
    """First come first served; while the first in the queue waits, later jobs take what it leaves free.

    They never delay it by more than a threshold. From the moment when it would fit without the later jobs, they have
    this much time to end. Then they are stopped, the last to arrive first, and wait again. This holds however long a
    job runs, so no estimate is needed.

    Args:
        threshold_s: in seconds; 0 stops them at once.
    """

    name = "backfill"
    adapts_batch_size = False

    def __init__(self, threshold_s: float = 600) -> None:
        if not 0 <= threshold_s < math.inf:
            raise ArgumentError(f"threshold_s must be at least 0 and finite, got {threshold_s}")
        self.threshold_s = threshold_s
        self._delayed: tuple[str, float] | None = None  # the first in the queue, and since when it would fit
        self._last = 0.0

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`."""
        next_decision, self._last = now + (now - self._last), now
        allocations = dict(current)
        free = cluster.free(allocations)
        for place, job in enumerate(jobs):
            if job.name in allocations:
                continue
            if job.gang <= sum(free):
                allocations[job.name] = take_emptiest(free, job.gang)
                continue
            later = [other.name for other in jobs[place + 1 :] if other.name in allocations]
            left = sum(free) + sum(count for name in later for _, count in allocations[name])
            if job.gang <= left and self._has_waited(job.name, now, next_decision):
                while job.gang > sum(free):
                    for node, count in allocations.pop(later.pop()):
                        free[node] += count
                allocations[job.name] = take_emptiest(free, job.gang)
                continue
            if job.gang > left:
                self._delayed = None
            for other in jobs[place + 1 :]:
                if other.name not in allocations and other.gang <= sum(free):
                    allocations[other.name] = take_emptiest(free, other.gang)
            break
        return allocations

    def _has_waited(self, name: str, now: float, next_decision: float) -> bool:
        """Whether the first in the queue would wait longer than the threshold until the next decision."""
        if self._delayed is None or self._delayed[0] != name:
            self._delayed = name, now
        return next_decision - self._delayed[1] > self.threshold_s


class ShortestRemaining:
    """Runs the jobs that end soonest on their gang, and stops others for them.

    A job that does not fit is passed over.
    """

    name = "srtf"
    adapts_batch_size = False

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`.

        Raises:
            ArgumentError: the run time of a job is unknown.
        """
        left, running = cluster.devices, []
        for job in sorted((job for job in jobs if job.gang <= cluster.devices), key=_seconds_left):
            if job.gang <= left:
                running.append(job)
                left -= job.gang
        allocations = {job.name: current[job.name] for job in running if job.name in current}
        free = cluster.free(allocations)
        for job in running:
            if job.name not in allocations:
                allocations[job.name] = take_emptiest(free, job.gang)
        return allocations


def _seconds_left(job: JobView) -> float:
    if job.seconds_left is None:
        raise ArgumentError(f"srtf needs an estimate of the time that each job has left, which {job.name} lacks")
    return job.seconds_left()
