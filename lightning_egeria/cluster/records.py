"""The log of a simulation, as lines of JSON.

The first line describes the simulation: ``policy``, ``nodes`` (devices of each), ``interval_s`` and ``submitted`` (time
of each job). Each other line is the end of an interval: its ``time``, the ``jobs`` that have arrived and not ended,
with their new allocation, and when each job ``completed`` that has ended since the last line. Intervals without jobs
have no line.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_egeria.cluster.jobs import Allocation, devices_of
from lightning_egeria.core.programs.files import parsed_json, read_text, write_whole
from lightning_egeria.errors import TraceError

_LARGEST = 2**28  # bytes of a log


@dataclasses.dataclass(frozen=True)
class JobState:
    """A job at the end of an interval.

    Attributes:
        allocation: its devices from now on.
        epoch: epochs it has ended.
        progress: in steps of the initial batch size.
        batch_size: over all devices; 0 without any.
        restarts: how often its devices have changed.
    """

    allocation: Allocation
    epoch: int
    progress: float
    batch_size: int
    restarts: int


@dataclasses.dataclass(frozen=True)
class Interval:
    """The cluster at the end of an interval.

    Attributes:
        time: in seconds.
        jobs: that have arrived and not ended.
        completed: when each job ended that has ended in this interval.
    """

    time: float
    jobs: dict[str, JobState]
    completed: dict[str, float]

    @property
    def devices(self) -> int:
        """Devices in use from now on."""
        return sum(devices_of(job.allocation) for job in self.jobs.values())


@dataclasses.dataclass
class Record:
    """What happened in a simulation.

    Attributes:
        policy: its name.
        nodes: devices of each node.
        interval_s: seconds between two decisions.
        submitted: time of each job, in the order of arrival.
        intervals: in order.
    """

    policy: str
    nodes: tuple[int, ...]
    interval_s: float
    submitted: dict[str, float]
    intervals: list[Interval] = dataclasses.field(default_factory=list)

    @property
    def completion_times(self) -> dict[str, float]:
        """Seconds from submission to end of each job that has ended."""
        ends = {name: end for interval in self.intervals for name, end in interval.completed.items()}
        return {name: ends[name] - time for name, time in self.submitted.items() if name in ends}

    @property
    def average_completion_s(self) -> float:
        """Mean of `completion_times`."""
        times = self.completion_times.values()
        return sum(times) / len(times)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first submission to the last end."""
        ends = [end for interval in self.intervals for end in interval.completed.values()]
        return max(ends) - min(self.submitted.values())

    @property
    def utilisation(self) -> float:
        """Mean share of devices that a job holds, from the first submission to the last end.

        It holds them from one decision to the next, or to its own end.
        """
        used = 0.0
        for interval, following in itertools.pairwise(self.intervals):
            for name, job in interval.jobs.items():
                end = min(following.completed.get(name, math.inf), following.time)
                used += devices_of(job.allocation) * (end - interval.time)
        return used / (sum(self.nodes) * self.makespan_s)

    def write(self, path: Path) -> None:
        """Write the log."""
        write_whole(path, "".join(json.dumps(line) + "\n" for line in self._lines()))

    def _lines(self) -> Iterator[dict[str, Any]]:
        described = dataclasses.asdict(self)
        intervals = described.pop("intervals")
        yield described
        yield from intervals

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a log.

        Raises:
            TraceError: the file cannot be read, or a line of it is no line of a log.
        """
        try:
            lines = iter(read_text(path, _LARGEST).splitlines())
            record = _described(**parsed_json(next(lines, "")))
            for text in lines:
                line = parsed_json(text)
                jobs = {name: _job_state(**job) for name, job in line.pop("jobs").items()}
                record.intervals.append(_interval(jobs=jobs, **line))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise TraceError(f"{path} is not a log of a simulation (JSON Lines): {error}") from error
        return record


def _described(policy: str, nodes: list[int], interval_s: float, submitted: dict[str, float]) -> Record:
    times = {name: _number(time) for name, time in submitted.items()}
    return Record(str(policy), tuple(_whole(devices) for devices in nodes), _number(interval_s), times)


def _interval(time: float, jobs: dict[str, JobState], completed: dict[str, float]) -> Interval:
    return Interval(_number(time), jobs, {name: _number(end) for name, end in completed.items()})


def _job_state(allocation: list[list[int]], epoch: int, progress: float, batch_size: int, restarts: int) -> JobState:
    places = tuple((_whole(node), _whole(count)) for node, count in allocation)
    return JobState(places, _whole(epoch), _number(progress), _whole(batch_size), _whole(restarts))


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"expected a whole number of at least 0, got {value!r:.40}")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not -1e300 < value < 1e300:  # type: ignore[operator]  # a number
        raise ValueError(f"expected a number, got {value!r:.40}")
    return value  # type: ignore[return-value]  # a number
