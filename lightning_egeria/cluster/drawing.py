"""Pictures of simulations, drawn with matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_egeria.cluster.records import Record

_WIDTH, _HEIGHT = 8.0, 3.2  # inches
_T = TypeVar("_T")
_LABEL = 28  # characters in a row
_COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#d53f8c", "#4a4a4a")  # of the lines in one panel
_HOUR_S = 3600
_FREE = -1
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8, "frameon": False}


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
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    colors = np.where(held == _FREE, np.nan, held * 7 % 20)
    hours = [interval.time / _HOUR_S for interval in record.intervals]
    axes.pcolormesh(hours, np.arange(starts[-1] + 1), colors, cmap=mpl.colormaps["tab20"], vmin=0, vmax=19)
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{record.policy}: jobs by device (white: free)", fontsize=10)
    axes.set_ylabel("device")
    axes.set_xlabel("hours")
    return figure


def completion_times(records: Sequence[Record]) -> Figure:
    """Draw the share of jobs that have ended within a time after their submission, five lines in a panel.

    Policies under which all jobs take the same time share a line.
    """
    alike: dict[tuple[float, ...], list[Record]] = {}
    for record in records:
        alike.setdefault(tuple(sorted(record.completion_times.values())), []).append(record)
    figure, panels = _panels(list(alike.items()))
    for axes, shown in panels:
        for (times, those), color in zip(shown, _COLORS, strict=False):
            names = ", ".join(record.policy for record in those)
            label = f"{names}: {those[0].average_completion_s:.0f} s on average"
            shares = np.arange(len(times) + 1) / len(times)
            minutes = [0, *(time / 60 for time in times)]
            axes.step(minutes, shares, where="post", color=color, label=textwrap.fill(label, _LABEL))
        axes.set_ylabel("share of jobs")
        axes.legend(**_BESIDE)
    axes.set_xlabel("minutes from submission to end")
    return figure


def utilisation(records: Sequence[Record]) -> Figure:
    """Draw the share of devices in use over time, a panel for each policy."""
    figure = Figure(figsize=(_WIDTH, 0.6 + 1.0 * len(records)), layout="constrained")
    panels = figure.subplots(len(records), 1, sharex=True, squeeze=False)[:, 0]
    for axes, record in zip(panels, records, strict=True):
        hours = [interval.time / _HOUR_S for interval in record.intervals]
        used = [interval.devices / sum(record.nodes) for interval in record.intervals]
        axes.fill_between(hours, used, step="post", color=_COLORS[0], alpha=0.6, linewidth=0)
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.5, 1])
        axes.set_title(f"{record.policy}, {record.utilisation:.0%} on average", fontsize=9, loc="left")
    figure.supylabel("share of devices in use", fontsize=10)
    panels[-1].set_xlabel("hours")
    return figure


def _panels(lines: Sequence[_T]) -> tuple[Figure, list[tuple[Axes, Sequence[_T]]]]:
    """Return panels of at most five lines, one above the other."""
    groups = [lines[place : place + len(_COLORS)] for place in range(0, len(lines), len(_COLORS))]
    figure = Figure(figsize=(_WIDTH, _HEIGHT * (0.3 + 0.7 * len(groups))), layout="constrained")
    axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for one in axes:
        one.set_ylim(0, 1.02)
    return figure, list(zip(axes, groups, strict=True))
