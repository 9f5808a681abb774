"""Pictures of simulations, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_egeria.cluster.records import Record

_WIDTH, _HEIGHT = 8.0, 3.2  # inches
_HOUR_S = 3600
_FREE = -1


def devices(record: Record) -> Figure:
    """Draw which job holds each device over time. Neighbouring jobs have different colours; a free device is white."""
    order = {name: number for number, name in enumerate(record.submitted)}
    starts = np.cumsum([0, *record.nodes])
    held = np.full((starts[-1], len(record.intervals) - 1), _FREE)
    for column, interval in enumerate(record.intervals[:-1]):  # all jobs have ended in the last
        filled = list(starts[:-1])
        for name, job in interval.jobs.items():
            for node, count in job.allocation:
                held[filled[node] : filled[node] + count, column] = order[name]
                filled[node] += count
    figure, axes = _new()
    colors = np.where(held == _FREE, np.nan, held * 7 % 20)
    hours = [interval.time / _HOUR_S for interval in record.intervals]
    axes.pcolormesh(hours, np.arange(starts[-1] + 1), colors, cmap=mpl.colormaps["tab20"], vmin=0, vmax=19)
    axes.invert_yaxis()
    axes.set_title(f"{record.policy}: who holds each device")
    axes.set_ylabel("device")
    axes.set_xlabel("hours")
    return figure


def completion_times(records: Sequence[Record]) -> Figure:
    """Draw the share of jobs that have ended within a time after their submission."""
    figure, axes = _new()
    for record in records:
        times = sorted(record.completion_times.values())
        label = f"{record.policy}, {record.average_completion_s:.0f} s on average"
        axes.step(
            [0, *(time / 60 for time in times)], np.arange(len(times) + 1) / len(times), where="post", label=label
        )
    axes.set_xscale("symlog", linthresh=10)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of jobs")
    axes.set_xlabel("minutes from submission to end")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def utilisation(records: Sequence[Record]) -> Figure:
    """Draw the share of devices in use over time."""
    figure, axes = _new()
    for record in records:
        hours = [interval.time / _HOUR_S for interval in record.intervals]
        used = [interval.devices / sum(record.nodes) for interval in record.intervals]
        label = f"{record.policy}, {record.utilisation:.0%} on average"
        axes.step(hours, used, where="post", linewidth=1, label=label)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of devices in use")
    axes.set_xlabel("hours")
    axes.legend(fontsize=8, frameon=False)
    return figure


def _new() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    return figure, figure.subplots()
