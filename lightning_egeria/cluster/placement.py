"""Placing the devices that a policy gives to each job on nodes, for jobs that run on one node each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, devices_of


def on_one_node(
    allocations: Mapping[str, Allocation],
    jobs: Sequence[JobView],
    cluster: Cluster,
    current: Mapping[str, Allocation],
    filling: Mapping[str, Allocation],
    shrinks: bool,
) -> tuple[dict[str, Allocation], set[str]]:
    """Return the devices of each job, all on one node, and the jobs that only fill a gap.

    A job whose number of devices stays keeps its node. Then the largest job comes first, and goes to the node that it
    fills best. A job that no node has room for gets what one node has, if it can shrink; a gang waits. What a waiting
    gang leaves free goes to jobs that the policy has given nothing: they fill a gap until the gang fits.

    Args:
        allocations: of a policy; what counts is the number of devices.
        jobs: all that wait or run, in the order of arrival.
        cluster: the devices.
        current: the devices that jobs have now, without those that only fill a gap.
        filling: the devices that those have.
        shrinks: whether jobs take fewer devices than the policy has given.

    >>> views = [JobView(name, 0.0, 0.0, 2, 2) for name in "xyz"]
    >>> two_each = {"x": ((0, 2),), "y": ((1, 2),), "z": ((0, 1), (1, 1))}
    >>> on_one_node(two_each, views, Cluster.of(2, 3), {}, {}, shrinks=False)
    ({'x': ((0, 2),), 'y': ((1, 2),)}, set())
    >>> on_one_node(two_each, views, Cluster.of(2, 3), {}, {}, shrinks=True)
    ({'x': ((0, 2),), 'y': ((1, 2),), 'z': ((0, 1),)}, set())
    """
    counts = {job.name: devices_of(allocations[job.name]) for job in jobs if job.name in allocations}
    placed = {name: row for name, row in current.items() if devices_of(row) == counts.get(name)}
    free = cluster.free(placed)

    def take(name: str, count: int) -> None:
        before = [node for node, _ in current.get(name, filling.get(name, ()))]
        fitting = (node for node, left in enumerate(free) if left >= count)
        node = min(fitting, key=lambda node: (node not in before, free[node]))
        free[node] -= count
        placed[name] = ((node, count),)

    for name in sorted(counts.keys() - placed.keys(), key=lambda name: (-counts[name], [*counts].index(name))):
        count = min(counts[name], max(free)) if shrinks else counts[name]
        if 0 < count <= max(free):
            take(name, count)
    fillers: set[str] = set()
    for job in () if shrinks else jobs:
        if job.name not in counts and job.gang <= max(free):
            take(job.name, job.gang)
            fillers.add(job.name)
    return placed, fillers
