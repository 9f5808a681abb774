"""A small workload with traces of its own, to try the simulator and to test it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from lightning_egeria.cluster.goodput import BatchLimits, gain
from lightning_egeria.cluster.tables import write_rows
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.cluster.workloads import Submission, write_workload

EPOCHS, STEPS = 12, 150  # of the initial batch size in an epoch
BATCH_SIZES = (64, 128, 256, 512, 1024)
LOCAL_BATCH_SIZES = (16, 32, 64, 128)
LIMITS = BatchLimits(BATCH_SIZES[0], BATCH_SIZES[-1], LOCAL_BATCH_SIZES[0], LOCAL_BATCH_SIZES[-1])
NODES, DEVICES = 16, 4  # the largest cluster that the traces cover
# One application scales well, one badly: throughput, and the noise of a gradient relative to its squared norm.
APPLICATIONS = {
    "vision": (ThroughputModel((0.02, 0.004), (0.04, 0.002), (0.01, 0.001), 2.0), 6.0),
    "ranking": (ThroughputModel((0.05, 0.001), (0.30, 0.020), (0.08, 0.010), 1.3), 1.5),
}


def write_example(folder: Path, jobs: int = 40, seconds_between: float = 60, seed: int = 0) -> Path:
    """Write ``traces/`` and ``workload.csv``.

    The traces follow the throughput model and a noise that grows with the epochs. Arrivals are a Poisson process.

    Args:
        folder: made if it is missing.
        jobs: number of jobs.
        seconds_between: mean distance of two arrivals.
        seed: of arrivals and of what the jobs are.

    Returns:
        The path of the workload.
    """
    for name, (model, noise) in APPLICATIONS.items():
        traces = folder / "traces" / name
        traces.mkdir(parents=True, exist_ok=True)
        _write_traces(traces, model, noise)
    chosen, time, submissions = random.Random(seed), 0.0, []
    for number in range(jobs):
        time += chosen.expovariate(1 / seconds_between)
        application, gang = chosen.choice(sorted(APPLICATIONS)), chosen.choice((1, 2, 4, 8))
        size = min(BATCH_SIZES[-1], BATCH_SIZES[0] * gang)
        submissions.append(Submission(f"{application}-{number}", int(time), application, gang, size))
    workload = folder / "workload.csv"
    write_workload(workload, submissions)
    return workload


def _write_traces(folder: Path, model: ThroughputModel, noise: float) -> None:
    placements = [
        placement
        for length in range(1, 5)
        for placement in itertools.product(range(1, DEVICES + 1), repeat=length)
        if placement == min(placement[i:] + placement[:i] for i in range(length))
    ]
    write_rows(
        folder / "placements.csv",
        ("placement", "local_bsz", "step_time", "sync_time"),
        (
            ("".join(map(str, placement)), local, *_times(model, len(placement), sum(placement), local))
            for placement in placements
            for local in LOCAL_BATCH_SIZES
        ),
    )
    write_rows(
        folder / "scalability.csv",
        ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"),
        (
            (nodes, replicas, local, *_times(model, nodes, replicas, local))
            for nodes in (6, 8, 12, NODES)
            for replicas in range(nodes, DEVICES * nodes + 1, nodes // 2)
            for local in LOCAL_BATCH_SIZES
        ),
    )
    for size in BATCH_SIZES:
        scale, iteration, rows = size / BATCH_SIZES[0], 0.0, []
        for epoch in range(EPOCHS):
            variance = noise * (1 + epoch)
            iteration += STEPS / float(gain(1.0, variance, scale))
            rows.append((STEPS * (epoch + 1), round(iteration), 1 / (1 + epoch), 1, variance))
        write_rows(folder / f"validation-{size}.csv", ("progress", "iteration", "metric", "grad_sqr", "grad_var"), rows)


def _times(model: ThroughputModel, nodes: int, replicas: int, local: int) -> tuple[float, float]:
    step, gradient = float(model.step_seconds(nodes, replicas, local)), float(model.gradient_seconds(local))
    return round(step, 6), round(step - gradient, 6)
