"""Workloads for the tests: our example, and the published one where it is."""

import functools
import json
import os
import tempfile
from pathlib import Path

import pytest

from lightning_egeria.cluster.example import write_example
from lightning_egeria.cluster.jobs import JobView
from lightning_egeria.cluster.traces import Application, read_applications
from lightning_egeria.cluster.workloads import Submission, read_workload

VARIABLE = "POLLUX_OSDI21"
FOLDER = Path(os.environ.get(VARIABLE, ""))
needs_published = pytest.mark.skipif(
    VARIABLE not in os.environ,
    reason=f"{VARIABLE} names no folder: the traces are those of simulator/ in petuum/adaptdl, branch osdi21-artifact",
)


@functools.cache
def example(
    jobs: int = 40, seconds_between: float = 60, seed: int = 0
) -> tuple[list[Submission], dict[str, Application]]:
    with tempfile.TemporaryDirectory() as folder:
        workload = read_workload(write_example(Path(folder), jobs, seconds_between, seed))
        return workload, read_applications(Path(folder) / "traces", ["ranking", "vision"])


@functools.cache
def published_traces() -> dict[str, Application]:
    return read_applications(FOLDER / "traces", ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"])


def published_workload(number: int, load: str = "1.0") -> list[Submission]:
    return read_workload(FOLDER / ("workloads" if load == "1.0" else f"workloads-{load}") / f"workload-{number}.csv")


def published_average(policy: str, load: str, number: int, results: str = "results-jobload") -> float:
    averages = json.loads((FOLDER / "published.json").read_text())
    return averages[f"{results}/{policy}-{load}"]["average_jct_s"][f"workload-{number}"]


def view(name: str, **values: object) -> JobView:
    defaults = {"submitted": 0.0, "age": 0.0, "gang": 1, "most_replicas": 64}
    return JobView(name, **{**defaults, **values})
