"""Fair share: every job has as many devices as any other, as far as it can use them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, devices_of, take_emptiest


class FairShare:
    """Gives one device after the other to the job that has fewest; the first to arrive goes first.

    A job keeps its devices where it has the right number already.
    """

    name = "fair"
    adapts_batch_size = True

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`."""
        counts = {job.name: 0 for job in jobs}
        least = [(0, place) for place, job in enumerate(jobs) if job.most_replicas > 0]  # a heap
        for _ in range(cluster.devices):
            if not least:
                break
            count, place = heapq.heappop(least)
            counts[jobs[place].name] = count + 1
            if count + 1 < jobs[place].most_replicas:
                heapq.heappush(least, (count + 1, place))
        allocations = {name: row for name, row in current.items() if name in counts and devices_of(row) == counts[name]}
        free = cluster.free(allocations)
        for name, count in counts.items():
            if count and name not in allocations:
                allocations[name] = take_emptiest(free, count)
        return allocations
