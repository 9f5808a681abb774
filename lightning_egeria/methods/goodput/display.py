"""Figures of a run with changing batch sizes, as plain numbers."""

from __future__ import annotations

import math

from lightning_egeria.cluster.goodput import Goodput
from lightning_egeria.core.training.panels import Panel
from lightning_egeria.methods.goodput.control import BatchSizeControl
from lightning_egeria.methods.goodput.decision import estimate

Points = list[tuple[float, float]]


def panels_of(control: BatchSizeControl, replicas: int) -> list[Panel]:
    """Return what a run knows of its goodput: over its steps, and throughput by batch size.

    Throughput over the steps is that of the model fitted last, at the batch size and frozen depth of each step.

    Args:
        control: of the run.
        replicas: number of processes.
    """
    return [*_over_steps(control), _by_batch_size(control, replicas)]


def _over_steps(control: BatchSizeControl) -> list[Panel]:
    sizes: Points = []
    scales: Points = []
    factors: dict[str, Points] = {"throughput": [], "goodput": []}
    efficiencies: Points = []
    fitted = {depth: control.profile.fit(depth) for depth in {moment.depth for moment in control.history.moments}}
    before: float | None = None
    for moment in control.history.moments:
        total = moment.division.total
        if before is not None and before != total:
            sizes.append((moment.step, before))
        before = total
        sizes.append((moment.step, total))
        if moment.variance > 0 and moment.squared_norm > 0:
            scales.append((moment.step, control.initial * moment.variance / moment.squared_norm))
        throughput = fitted[moment.depth]
        if throughput is None or moment.variance + moment.squared_norm == 0:
            continue
        limits = control.limits(moment.division.replicas)
        goodput = Goodput(throughput, moment.squared_norm, moment.variance, limits)
        found = estimate(goodput, moment.division, control.nodes)
        factors["throughput"].append((moment.step, found.throughput))
        factors["goodput"].append((moment.step, found.goodput))
        efficiencies.append((moment.step, found.efficiency))
    steps = "optimizer steps"
    return [
        Panel(
            "goodput_batch_size",
            "Batch size",
            "Samples of an optimizer step.",
            steps,
            "samples",
            {"batch size": sizes},
        ),
        Panel(
            "goodput_noise",
            "Gradient noise scale",
            "At this batch size, a sample brings half of the progress that it can bring.",
            steps,
            "samples",
            {"noise scale": scales},
        ),
        Panel(
            "goodput_rate",
            "Goodput",
            "Goodput is throughput times efficiency.",
            steps,
            "samples/s",
            factors,
        ),
        Panel(
            "goodput_efficiency",
            "Statistical efficiency",
            "Progress that a sample brings, relative to the initial batch size.",
            steps,
            "efficiency",
            {"efficiency": efficiencies},
        ),
    ]


def _by_batch_size(control: BatchSizeControl, replicas: int) -> Panel:
    times = control.profile.measured(control.depth)
    places = {where: stepped for where, (_, stepped) in times.items() if where.replicas == replicas}
    throughput = control.profile.fit(control.depth)
    sizes = sorted({where.local for where in places})
    measured: Points = [(where.local, replicas * where.local / seconds) for where, seconds in sorted(places.items())]
    fitted: Points = []
    if throughput is not None and sizes:
        smallest, largest = sizes[0], max(sizes[-1], min(control.limits(replicas).largest_local, 4 * sizes[-1]))
        for number in range(33):
            local = smallest * math.exp(math.log(largest / smallest) * number / 32)
            fitted.append((local, replicas * local / float(throughput.step_seconds(control.nodes, replicas, local))))
    return Panel(
        "goodput_throughput",
        "Throughput by batch size",
        "Measured medians, and the model that was fitted to them.",
        "samples of a batch in one process",
        "samples/s",
        {"measured": measured, "fitted": fitted},
    )
