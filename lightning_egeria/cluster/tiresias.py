"""Tiresias (Gu et al., NSDI 2019): the jobs that have had least service first, in two queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, take_emptiest

DEMOTION_DEVICE_S = 16 * 3600


class Tiresias:
    """Two queues, first come first served in each; gangs only.

    A job begins in the first queue and falls to the second after 16 device-hours of service. It never comes back. A job
    that does not fit is passed over, and one that no longer fits stops.
    """

    name = "tiresias"
    adapts_batch_size = False

    def __init__(self) -> None:
        self._queues: tuple[list[str], list[str]] = ([], [])

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`."""
        views = {job.name: job for job in jobs}
        first, second = ([name for name in queue if name in views] for queue in self._queues)
        first += [name for name in views if name not in {*first, *second}]
        demoted = [name for name in views if name in first and views[name].service >= DEMOTION_DEVICE_S]
        first = [name for name in first if name not in demoted]
        second += demoted
        self._queues = first, second

        left = cluster.devices
        running = []
        for name in first + second:
            if views[name].gang <= left:
                running.append(name)
                left -= views[name].gang
        allocations = {name: current[name] for name in running if name in current}
        free = cluster.free(allocations)
        for name in running:
            if name not in allocations:
                allocations[name] = take_emptiest(free, views[name].gang)
        return allocations
