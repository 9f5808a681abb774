"""Workloads: which jobs arrive when."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from lightning_egeria.errors import TraceError

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclasses.dataclass(frozen=True)
class Submission:
    """One job of a workload.

    Attributes:
        name: unique in the workload.
        time: of its arrival, in seconds.
        application: whose traces it follows.
        gang: devices its user asked for.
        batch_size: that its user has tuned for these devices, over all of them.
    """

    name: str
    time: int
    application: str
    gang: int
    batch_size: int


def read_workload(path: Path) -> list[Submission]:
    """Read a workload from a CSV file with the columns ``name,time,application,num_replicas,batch_size``.

    Raises:
        TraceError: the file cannot be read, or a line of it is no job. The message names file and line.
    """
    submissions: list[Submission] = []
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    time, gang, batch_size = (int(row[column]) for column in ("time", "num_replicas", "batch_size"))
                    job = Submission(row["name"], time, row["application"], gang, batch_size)
                except (KeyError, TypeError, ValueError) as error:
                    raise TraceError(f"line {number} of {path} needs {', '.join(COLUMNS)}: {error}") from error
                if time < 0 or gang < 1 or batch_size < 1 or not job.name or not job.application:
                    raise TraceError(f"line {number} of {path} is no job: {job}. Expected a name, counts of at least 1")
                submissions.append(job)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read as CSV: {error}") from error
    names = [job.name for job in submissions]
    if not names or len(set(names)) < len(names):
        raise TraceError(f"{path} needs at least one job, and a different name for each")
    return submissions


def read_philly(path: Path) -> list[tuple[float, float, int]]:
    """Read Microsoft's Philly trace as the Pollux artifact has it: ``timestamp,duration,num_gpus`` of each job.

    Returns:
        Seconds of arrival after the first job, seconds of duration, and devices, in the order of arrival.

    Raises:
        TraceError: the file cannot be read, or a line of it is no job.
    """
    try:
        with path.open(newline="") as file:
            rows = sorted(
                (datetime.fromisoformat(row["timestamp"]), float(row["duration"]), int(row["num_gpus"]))
                for row in csv.DictReader(file)
            )
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise TraceError(
            f"{path} is no Philly trace with the columns timestamp, duration, num_gpus: {error}"
        ) from error
    return [((time - rows[0][0]).total_seconds(), duration, gang) for time, duration, gang in rows]


def write_workload(path: Path, submissions: Iterable[Submission]) -> None:
    """Write a workload in the format that `read_workload` reads."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(dataclasses.astuple(job) for job in submissions)
