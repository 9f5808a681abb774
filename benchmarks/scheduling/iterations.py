"""Jobs as streams of iterations, and gangs that run them one job at a time.

With structured partial backprop (Kumar et al., arXiv:2111.10672) an iteration goes back through the last layer modules
only. How many is its depth here; the mean depth of a job must not fall below its floor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_egeria.core.programs.files import read_json
from lightning_egeria.errors import ArgumentError, SchedulingError, TraceError

_LARGEST = 2**20  # bytes of measured costs


@dataclasses.dataclass(frozen=True)
class IterationCost:
    """What an iteration costs on each device of a gang.

    Attributes:
        seconds: of an iteration with depth 1, 2, ...; the last one goes back through all layer modules.
        memory: share of a device that it takes, likewise.

    Raises:
        ArgumentError: the two differ in length, are empty, not positive, or fall with depth.

    >>> IterationCost((1.0, 2.0, 4.0), (0.3, 0.4, 0.5)).cheapest(1.5)
    1.5
    """

    seconds: tuple[float, ...]
    memory: tuple[float, ...]

    def __post_init__(self) -> None:
        for values in (self.seconds, self.memory):
            rising = all(low <= high for low, high in itertools.pairwise(values))
            if len(values) != len(self.memory) or not values or not values[0] > 0 or not rising:
                raise ArgumentError(f"expected seconds and memory by depth, positive and not falling, got {self}")

    @property
    def depths(self) -> int:
        """The largest depth, which is all layer modules."""
        return len(self.seconds)

    @property
    def full_s(self) -> float:
        """Seconds of an iteration that goes back through all layer modules."""
        return self.seconds[-1]

    def cheapest(self, mean_depth: float) -> float:
        """Return the least mean seconds of iterations with this mean depth: a mixture of two depths at most."""
        points = list(enumerate(self.seconds, 1))
        return min(
            low + (high - low) * (mean_depth - first) / (second - first) if second > first else low
            for first, low in points
            for second, high in points
            if first <= mean_depth <= second
        )

    @classmethod
    def read(cls, path: Path, device_bytes: float) -> IterationCost:
        """Read costs that ``benchmarks/iteration_costs.py`` has measured.

        A depth that was measured to cost less than a smaller one counts as much.

        Args:
            path: JSON: ``forward_s``, ``backward_s`` and ``bytes`` by depth.
            device_bytes: memory of a device.

        Raises:
            TraceError: the file has no such costs, or they do not fit into a device.
        """
        try:
            content = read_json(path, _LARGEST)
            columns = [[float(value) for value in content[name]] for name in ("forward_s", "backward_s", "bytes")]
            forward, backward, used = map(np.array, columns)
            seconds, shares = np.maximum.accumulate(forward + backward), np.maximum.accumulate(used / device_bytes)
            if content["version"] != 1 or not np.isfinite(seconds).all() or not 0 < shares.max() <= 1:
                raise ValueError(f"expected version 1 and at most {device_bytes:g} bytes")
            return cls(tuple(seconds.tolist()), tuple(shares.tolist()))
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise TraceError(f"{path} has no measured costs of an iteration by depth: {error}") from error


@dataclasses.dataclass(frozen=True)
class IterationJob:
    """A job that ends after a number of iterations.

    Attributes:
        name: unique among the jobs.
        arrival_s: when it arrives.
        gang: devices, all at once.
        iterations: how many.
        cost: of one, on each device.
        floor: least mean depth, as a share of all layer modules; 1 allows no partial backprop.

    Raises:
        ArgumentError: a number is out of its range.
    """

    name: str
    arrival_s: float
    gang: int
    iterations: int
    cost: IterationCost
    floor: float = 1.0

    def __post_init__(self) -> None:
        if self.gang < 1 or self.iterations < 1 or not 1 / self.cost.depths <= self.floor <= 1:
            raise ArgumentError(f"expected a gang and iterations of at least 1, and a floor up to 1, got {self}")

    @property
    def least_depth(self) -> float:
        """The floor in layer modules."""
        return self.floor * self.cost.depths

    @property
    def usual_depth(self) -> int:
        """The depth that its iterations need at most to keep to the floor."""
        return max(1, math.ceil(self.least_depth - 1e-9))

    @property
    def work(self) -> float:
        """Device-seconds with full backprop."""
        return self.gang * self.iterations * self.cost.full_s


@dataclasses.dataclass
class IterationRun:
    """What happened to jobs of iterations.

    Attributes:
        jobs: all.
        devices: of the cluster.
        ended: when each job ended, in seconds.
        mean_depth: of each job's iterations, as a share of its layer modules.
    """

    jobs: Sequence[IterationJob]
    devices: int
    ended: dict[str, float] = dataclasses.field(default_factory=dict)
    mean_depth: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first arrival to the last end."""
        return max(self.ended.values()) - min(job.arrival_s for job in self.jobs)

    @property
    def efficiency(self) -> float:
        """Device-seconds that full backprop would have needed, by those that the cluster had."""
        return sum(job.work for job in self.jobs) / (self.devices * self.makespan_s)

    @property
    def average_completion_s(self) -> float:
        """Mean time from arrival to end."""
        return sum(self.ended[job.name] - job.arrival_s for job in self.jobs) / len(self.jobs)


def ceiling(jobs: Sequence[IterationJob]) -> float:
    """Return the efficiency that nothing exceeds: no gap, and each job at its floor."""
    least = sum(job.gang * job.iterations * job.cost.cheapest(job.least_depth) for job in jobs)
    return sum(job.work for job in jobs) / least


def run_gangs(jobs: Sequence[IterationJob], devices: int, shortest_first: bool = False) -> IterationRun:
    """Give each job its devices until it ends, each iteration as short as its floor allows.

    Args:
        jobs: with a floor of 1 for full backprop.
        devices: of the cluster.
        shortest_first: the job with least time left runs first and stops others. Otherwise, in the order of arrival.

    Raises:
        SchedulingError: a job asks for more devices than there are.
    """
    check_gangs(jobs, devices)
    run = IterationRun(jobs, devices, mean_depth={job.name: job.floor for job in jobs})
    waiting = sorted(jobs, key=lambda job: job.arrival_s)
    left = {job.name: job.iterations * job.cost.cheapest(job.least_depth) for job in jobs}
    present: list[IterationJob] = []
    now = 0.0
    while waiting or present:
        if not present:
            now = max(now, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now:
            present.append(waiting.pop(0))
        if shortest_first:
            present.sort(key=lambda job: left[job.name])
        free, running = devices, []
        for job in present:
            if job.gang <= free:
                running.append(job)
                free -= job.gang
            elif not shortest_first:
                break
        until = min(left[job.name] for job in running)
        if waiting:
            until = min(until, waiting[0].arrival_s - now)
        now += until
        for job in running:
            left[job.name] -= until
            if left[job.name] <= 1e-9:
                run.ended[job.name] = now
                present.remove(job)
    return run


def check_gangs(jobs: Sequence[IterationJob], devices: int) -> None:
    """Raise a `SchedulingError` if a job can never run."""
    for job in jobs:
        if (need := job.cost.memory[job.usual_depth - 1]) > 1:
            raise SchedulingError(f"{job.name} takes {need:.2f} of a device's memory at its floor, expected at most 1")
        if job.gang > devices:
            raise SchedulingError(f"{job.name} asks for {job.gang} devices at once, expected at most {devices}")
