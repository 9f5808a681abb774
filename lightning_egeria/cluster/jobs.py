"""What a policy sees of a job and of a cluster, and what it returns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lightning_egeria.errors import ArgumentError, SchedulingError

# Queues do without scipy, which takes half a second to import and is an extra.
if TYPE_CHECKING:
    from lightning_egeria.cluster.goodput import Goodput

# (node, devices on it), in the order in which they were taken. A job without devices has no allocation.
Allocation = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The devices that jobs compete for.

    Attributes:
        nodes: devices of each node.

    Raises:
        ArgumentError: there is no node, or one without devices.

    >>> Cluster.of(16, 4).devices
    64
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < 1:
            raise ArgumentError(f"a cluster needs nodes with at least one device each, got {self.nodes}")

    @classmethod
    def of(cls, nodes: int, devices: int) -> Cluster:
        """Return a cluster of equal nodes with ``devices`` devices each."""
        return cls((devices,) * nodes)

    @property
    def devices(self) -> int:
        """Number of devices of all nodes."""
        return sum(self.nodes)

    def free(self, allocations: Mapping[str, Allocation]) -> list[int]:
        """Return the devices of each node that no job holds."""
        free = list(self.nodes)
        for allocation in allocations.values():
            for node, count in allocation:
                free[node] -= count
        return free


class Oracle(Protocol):
    """What only a simulator knows of a job."""

    def step_seconds(self, replicas: int) -> float:
        """Return the duration of a step on full nodes and one rest."""

    @property
    def steps_left(self) -> float:
        """Optimizer steps until the job ends."""


@dataclasses.dataclass(frozen=True)
class JobView:
    """What a policy sees of a job that has arrived and not ended.

    Attributes:
        name: unique among the jobs.
        submitted: when the job arrived, in seconds.
        age: seconds since then.
        gang: devices the user asked for, all at once.
        most_replicas: devices the job can use at all.
        profiled: most devices it ever ran on.
        service: device-seconds it has had.
        restarts: how often its devices changed after it had started.
        model: its measured speed; None before its first step.
        unfrozen: the speed it would have if it had frozen no layers; None if it has frozen none.
        oracle: its true speed and length; None outside of a simulation.
        seconds_left: estimates its run time on its gang; None if unknown.
    """

    name: str
    submitted: float
    age: float
    gang: int
    most_replicas: int
    profiled: int = 0
    service: float = 0.0
    restarts: int = 0
    model: Goodput | None = None
    unfrozen: Goodput | None = None
    oracle: Oracle | None = None
    seconds_left: Callable[[], float] | None = None


class Policy(Protocol):
    """Decides at every interval which job runs on which devices.

    Attributes:
        name: of the policy.
        adapts_batch_size: whether jobs choose their batch size for the devices they have. Otherwise they keep the one
            their user has tuned.
    """

    name: str
    adapts_batch_size: bool

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """Return the devices of each job that shall run.

        Args:
            jobs: all that have arrived and not ended, in the order of arrival.
            cluster: the devices.
            current: the devices each of these jobs has now.
            now: seconds.
        """


def devices_of(allocation: Allocation) -> int:
    """Return the number of devices.

    >>> devices_of(((3, 4), (0, 1)))
    5
    """
    return sum(count for _, count in allocation)


def take_emptiest(free: list[int], count: int) -> Allocation:
    """Take ``count`` devices, from the node with most free devices first, then from the next.

    Args:
        free: free devices of each node; reduced by what is taken.
        count: not more than are free.

    >>> free = [1, 4, 3]
    >>> take_emptiest(free, 5), free
    (((1, 4), (2, 1)), [1, 0, 2])
    """
    taken: list[tuple[int, int]] = []
    while count > 0:
        most = max(free)
        if most < 1:
            raise ArgumentError(f"{count} more devices are wanted than are free")
        node = free.index(most)
        share = min(most, count)
        taken.append((node, share))
        free[node] -= share
        count -= share
    return tuple(taken)


def check(allocations: Mapping[str, Allocation], jobs: Sequence[JobView], cluster: Cluster, policy: str) -> None:
    """Refuse allocations that no cluster can give.

    Raises:
        SchedulingError: a node is unknown or has too few devices, a job is unknown, or an entry is empty.
    """
    unknown = allocations.keys() - {job.name for job in jobs}
    if unknown:
        raise SchedulingError(f"{policy} gave devices to {sorted(unknown)}, which neither wait nor run")
    used: Counter[int] = Counter()
    for name, allocation in allocations.items():
        nodes = [node for node, _ in allocation]
        sound = all(0 <= node < len(cluster.nodes) and count > 0 for node, count in allocation)
        if not nodes or not sound or len(set(nodes)) < len(nodes):
            raise SchedulingError(f"{policy} gave {name} {allocation}: expected distinct nodes with devices on each")
        used.update(dict(allocation))
    for node, count in used.items():
        if count > cluster.nodes[node]:
            raise SchedulingError(f"{policy} gave away {count} devices of node {node}, which has {cluster.nodes[node]}")
