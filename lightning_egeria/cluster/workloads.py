"""Workloads: which jobs arrive when."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from lightning_egeria.cluster.tables import read_rows, write_rows
from lightning_egeria.core.programs.files import read_text
from lightning_egeria.errors import TraceError

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
_LARGEST = 2**24  # bytes of a trace
_BOUNDS = {"time": (0, 10**10), "num_replicas": (1, 10**6), "batch_size": (1, 10**9)}


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
    lines: dict[str, int] = {}
    submissions = []
    for line, row in read_rows(path, COLUMNS):
        name, application = row["name"], row["application"]
        if not name or not application:
            raise TraceError(f"line {line} of {path} has no name or no application, expected both")
        if lines.setdefault(name, line) != line:
            raise TraceError(f"lines {lines[name]} and {line} of {path} are both named {name}. Rename one")
        time, gang, batch_size = (_whole(row, column, f"line {line} of {path}") for column in _BOUNDS)
        submissions.append(Submission(name, time, application, gang, batch_size))
    return submissions


def _whole(row: Mapping[str, str], column: str, where: str) -> int:
    (least, most), text = _BOUNDS[column], row[column]
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise TraceError(f"{where}: {column} is {text!r}, expected a whole number from {least} to {most}")
    return value


def read_philly(path: Path) -> list[tuple[float, float, int]]:
    """Read Microsoft's Philly trace as the Pollux artifact has it: ``timestamp,duration,num_gpus`` of each job.

    Returns:
        Seconds of arrival after the first job, seconds of duration, and devices, in the order of arrival.

    Raises:
        TraceError: the file cannot be read, or a line of it is no job.
    """
    try:
        rows = sorted(
            (datetime.fromisoformat(row["timestamp"]), float(row["duration"]), int(row["num_gpus"]))
            for row in csv.DictReader(io.StringIO(read_text(path, _LARGEST), newline=""))
        )
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise TraceError(
            f"{path} is not a Philly trace with the columns timestamp, duration, num_gpus: {error}"
        ) from error
    return [((time - rows[0][0]).total_seconds(), duration, gang) for time, duration, gang in rows]


def write_workload(path: Path, submissions: Iterable[Submission]) -> None:
    """Write a workload in the format that `read_workload` reads."""
    write_rows(path, COLUMNS, (dataclasses.astuple(job) for job in submissions))
