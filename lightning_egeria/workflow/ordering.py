"""Which local jobs run: first come first served with priorities and fair share, and thresholded back-fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView
from lightning_egeria.cluster.queues import BackFill

THRESHOLD_S = 600.0  # that a back-filled job may hold up the first in the queue


@dataclasses.dataclass(frozen=True)
class Waiting:
    """What the order looks at.

    Attributes:
        id: of the job; a higher one came later.
        devices: how many it needs.
        priority: higher goes first.
        share: whose fair share it uses.
        running: whether it runs now.
        filled: whether it runs in a gap, in front of a job that still waits.
    """

    id: int
    devices: int
    priority: int = 0
    share: str = ""
    running: bool = False
    filled: bool = False


def in_order(jobs: Sequence[Waiting], usage: Mapping[str, float]) -> list[Waiting]:
    """Return jobs in the order in which they get devices.

    Running jobs keep theirs. Then the highest priority, then the share that has used least, then the earliest. Jobs
    that run in a gap come last, since they make room.

    Args:
        jobs: that wait or run.
        usage: device-seconds of each share.
    """
    return sorted(
        jobs,
        key=lambda job: (
            (not job.running or job.filled) + (job.running and job.filled),
            *((0, 0.0) if job.running else (-job.priority, usage.get(job.share, 0.0))),
            job.id,
        ),
    )


class Order:
    """Chooses which jobs run on the devices of this machine.

    Args:
        devices: of this machine.
        threshold_s: longest delay of the first in the queue by jobs that fill gaps.
    """

    def __init__(self, devices: int, threshold_s: float = THRESHOLD_S) -> None:
        self.cluster = Cluster.of(1, devices)
        self._policy = BackFill(threshold_s)

    def choose(
        self, jobs: Sequence[Waiting], usage: Mapping[str, float], now: float
    ) -> tuple[dict[int, frozenset[int]], list[int]]:
        """Return the jobs to start, each with those that it passes over, and the jobs to stop.

        Args:
            jobs: that wait or run; none needs more devices than there are.
            usage: device-seconds of each share.
            now: seconds.
        """
        ordered = in_order(jobs, usage)
        views = [JobView(str(job.id), 0.0, 0.0, job.devices, job.devices) for job in ordered]
        current: dict[str, Allocation] = {str(job.id): ((0, job.devices),) for job in jobs if job.running}
        wanted = self._policy.allocate(views, self.cluster, current, now)
        starts: dict[int, frozenset[int]] = {}
        passed: set[int] = set()
        for job in ordered:
            if not job.running and str(job.id) in wanted:
                starts[job.id] = frozenset(passed)
            elif not job.running:
                passed.add(job.id)
        return starts, [job.id for job in ordered if job.running and str(job.id) not in wanted]
