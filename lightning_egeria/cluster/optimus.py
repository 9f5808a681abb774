"""Optimus (Peng et al., EuroSys 2018), with an oracle: one more device to the job that it brings nearest to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, devices_of, take_emptiest
from lightning_egeria.errors import ArgumentError


class Optimus:
    """Chooses the number of devices of each job by marginal gain.

    Each job gets one device, in the order of arrival. Then one device after the other goes to the job whose remaining
    time it shortens most. A job keeps its devices if their number stays.
    """

    name = "optimus"
    adapts_batch_size = False

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`.

        Raises:
            ArgumentError: a job has no `Oracle`.
        """
        left = cluster.devices
        replicas: dict[str, int] = {}
        gains: dict[str, float] = {}
        for job in jobs[:left]:
            replicas[job.name] = 1
            gains[job.name] = _gain(job, 1)
        left -= len(replicas)
        views = {job.name: job for job in jobs}
        while left and max(gains.values()) > 0:
            best = max(gains, key=gains.__getitem__)
            replicas[best] += 1
            gains[best] = _gain(views[best], replicas[best])
            left -= 1

        allocations = {
            name: allocation for name, allocation in current.items() if devices_of(allocation) == replicas.get(name)
        }
        free = cluster.free(allocations)
        for name in sorted(replicas, key=replicas.__getitem__):
            if name not in allocations:
                allocations[name] = take_emptiest(free, replicas[name])
        return allocations


def _gain(job: JobView, replicas: int) -> float:
    """Return the seconds until the job ends that one more device saves."""
    if job.oracle is None:
        raise ArgumentError(f"Optimus needs the true speed of a job, which {job.name} has in a simulation only")
    if replicas >= job.most_replicas:
        return 0.0
    faster = job.oracle.step_seconds(replicas) - job.oracle.step_seconds(replicas + 1)
    return faster * job.oracle.steps_left
