"""Figures of runs, drawn with matplotlib."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from lightning_egeria.core.training.panels import Panel
from lightning_egeria.report.comparison import common_metric, last_value, times_to_target
from lightning_egeria.report.record import RunRecord, StepTimes

PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "communication": "waiting for other processes",
    "rest": "optimizer and rest",
}
_COLORS = dict(zip(PHASES, ("#8da0cb", "#66c2a5", "#fc8d62", "#e78ac3", "#b3b3b3"), strict=True))
_SOURCES = {  # of samples, with colour and title
    "hits": ("#66c2a5", "from the cache"),
    "advanced": ("#ffd92f", "from another entry"),
    "misses": ("#fc8d62", "computed"),
}
_FIRST, _OTHERS = "#4a4a4a", ("#2b6cb0", "#c05621", "#2f855a", "#d53f8c")  # colours of series that are told apart
_WIDTH, _HEIGHT = 8.0, 3.2  # inches
_MOST_NAMED = 5  # series in a legend; of more, the first and the last
_MOST_BARS = 200  # of a series
# No legend hides data.
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8, "frameon": False}
_ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "fontsize": 8, "frameon": False}


def plasticity(record: RunRecord) -> Figure:
    """Draw plasticity and its absolute slope over the steps: one line per layer module, dark in front."""
    titles = {"plasticity": "plasticity", "slopes": "absolute slope"}
    # Only `SlopePolicy` has slopes.
    shown = [field for field in titles if any(any(getattr(point, field)) for point in record.evaluations)]
    figure, panels = _new(max(1, len(shown)), share=True)
    count = len(record.layer_modules)
    for axes, field in zip(panels, shown, strict=False):
        for index, name in enumerate(record.layer_modules):
            points = [(e.step, getattr(e, field)[index]) for e in record.evaluations if index < len(getattr(e, field))]
            drawn = [(step, abs(value)) for step, value in points if value]
            color = _shade(index, count)
            axes.plot(*_columns(drawn), color=color, linewidth=1, label=_label(name, index, count))
        _make_logarithmic(axes)
        axes.set_ylabel(titles[field])
        _draw_events(axes, record)
    if shown:
        panels[0].legend(**_BESIDE)
    panels[-1].set_xlabel("optimizer steps")
    return figure


def depth(record: RunRecord) -> Figure:
    """Draw the number of frozen layer modules over the steps."""
    figure, (axes,) = _new(1)
    steps, depths = [0], [0]
    for event in record.events:
        steps.append(event["step"])
        depths.append(event["depth"])
    steps.append(max([record.steps[-1].step] if record.steps else [0], default=0))
    depths.append(depths[-1])
    axes.step(steps, depths, where="post", color="#2b6cb0")
    axes.fill_between(steps, depths, step="post", alpha=0.2, color="#2b6cb0")
    axes.set_ylim(0, max(1, len(record.layer_modules)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"frozen layer modules of {len(record.layer_modules)}")
    axes.set_xlabel("optimizer steps")
    return figure


def step_time(record: RunRecord) -> Figure:
    """Draw the milliseconds of a training batch over the steps, including the wait for data."""
    figure, (axes,) = _new(1)
    axes.plot([t.step for t in record.steps], [t.seconds * 1e3 for t in record.steps], linewidth=1, color="#2b6cb0")
    times = sorted(t.seconds * 1e3 for t in record.steps)
    if times:  # a few very slow steps would flatten the rest
        axes.set_ylim(0, 1.5 * times[int(0.98 * (len(times) - 1))])
    _draw_events(axes, record)
    axes.set_ylabel("ms per batch")
    axes.set_xlabel("optimizer steps")
    return figure


def phases(record: RunRecord) -> Figure:
    """Draw the phases of a typical batch, with nothing frozen and at the last depth."""
    figure, (axes,) = _new(1)
    last = record.steps[-1].depth if record.steps else 0
    bars: dict[str, StepTimes] = {}
    for label, at in {"nothing frozen": 0, **({f"{last} frozen": last} if last else {})}.items():
        typical = record.typical_times(at)
        if typical is not None:
            bars[label] = typical
    left = [0.0] * len(bars)
    for phase, title in PHASES.items():
        widths = [getattr(times, phase) * 1e3 for times in bars.values()]
        if any(width > 0 for width in widths):
            axes.barh(list(bars), widths, left=left, color=_COLORS[phase], label=title, height=0.5)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.1f} ms", va="center", fontsize=9)
    axes.set_ylim(max(1.0, len(bars) - 0.5), min(-0.5, len(bars) - 2.0))  # a single bar is not thicker
    axes.set_xlim(0, 1.15 * max(left, default=1.0) or 1.0)
    axes.set_xlabel("ms per batch")
    if bars:
        axes.legend(ncols=len(PHASES), **_ABOVE)
    return figure


def cache(record: RunRecord) -> Figure:
    """Draw samples from the cache, computed samples, and the size on disk over the steps."""
    figure, (axes,) = _new(1)
    steps = [point.step for point in record.cache]
    below = [0] * len(steps)
    for field, (color, title) in _SOURCES.items():
        above = [low + getattr(point, field) for low, point in zip(below, record.cache, strict=True)]
        if above != below:
            axes.fill_between(steps, below, above, color=color, label=title)
        below = above
    axes.set_ylabel("samples since the first freeze")
    axes.set_xlabel("optimizer steps")
    axes.set_ylim(bottom=0)
    size = axes.twinx()
    size.plot(steps, [point.bytes_on_disk / 1e6 for point in record.cache], color="#333333", linestyle="--")
    size.set_ylabel("MB on disk (dashed)")
    size.set_ylim(bottom=0)
    if axes.collections:
        axes.legend(ncols=len(_SOURCES), **_ABOVE)
    return figure


def panel(found: Panel) -> Figure:
    """Draw what a method shows of itself."""
    figure, (axes,) = _new(1)
    count = len(found.series)
    places = sorted({x for points in found.series.values() for x, _ in points})
    room = 0.9 * min((b - a for a, b in itertools.pairwise(places)), default=1.0)  # for the bars at a place
    for row, (name, points) in enumerate(found.series.items()):
        style = {"color": _color(row, count), "label": _label(name, row, count)}
        if found.kind == "line":
            width = 1 + 1.5 * max(0, 2 - row) * (count > 1)  # one that others cover is wider
            axes.plot(*_columns(points), marker="." if len(points) < 50 else "", linewidth=width, **style)
        elif found.kind == "bars":
            if len(points) > _MOST_BARS:  # each bar is one object, and too thin to be seen
                axes.vlines([x for x, _ in points], 0, [y for _, y in points], alpha=0.6, **style)
            else:
                left = [x - room / 2 + room * row / count for x, _ in points]
                axes.bar(left, [y for _, y in points], width=room / count, align="edge", **style)
        else:
            axes.broken_barh([(begin, end - begin) for begin, end in points], (row - 0.3, 0.6), color=_OTHERS[0])
    if found.kind == "spans":
        axes.set_yticks(range(count), list(found.series), fontsize=8)
        axes.invert_yaxis()
    elif count > 1:
        axes.legend(**_BESIDE)
    if found.kind == "bars" and len(places) == 1:
        axes.set_xlim(places[0] - 2, places[0] + 2)
    if found.log:
        _make_logarithmic(axes)
    elif found.kind == "line" and all(y >= 0 for points in found.series.values() for _, y in points):
        axes.set_ylim(bottom=0)
    if all(float(x).is_integer() for points in found.series.values() for x, _ in points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(found.x)
    axes.set_ylabel(found.y)
    return figure


def accuracy(records: Sequence[RunRecord], metric: str | None = None) -> Figure:
    """Draw a logged metric over wall time, one line per run, with the time to the final value of the first run.

    Each panel has the first run and at most four others.

    Args:
        records: records of the runs; the others are compared with the first.
        metric: name of the metric; None takes one that all runs have, an accuracy if possible.

    Raises:
        RecordError: if the runs have no such metric in common.
    """
    metric = metric or common_metric(records)
    target = last_value(records[0], metric)
    first, *others = zip(records, times_to_target(records, metric), strict=True)
    groups = [others[place : place + len(_OTHERS)] for place in range(0, len(others), len(_OTHERS))] or [[]]
    figure, panels = _new(len(groups), share=True)
    for axes, group in zip(panels, groups, strict=True):
        for (record, reached), color in zip([first, *group], (_FIRST, *_OTHERS), strict=False):
            points = [(p.seconds, p.values[metric]) for p in record.metrics if metric in p.values]
            axes.plot(*_columns(points), marker=".", color=color, label=f"{record.name}: {reached.note}")
            if reached.seconds is not None:
                axes.plot([reached.seconds], [target], "o", color=color, markersize=8, fillstyle="none")
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_ylabel(metric)
        axes.legend(title=f"time to {target:.4g}", title_fontsize=8, ncols=2, **_ABOVE)
    panels[-1].set_xlabel("seconds of wall time, validation included")
    return figure


def run_in_detail(records: Sequence[RunRecord]) -> RunRecord:
    """Return the last run that froze something, else the last with freezing or figures of a method, else the last."""
    return max(reversed(records), key=lambda record: (bool(record.events), bool(record.layer_modules or record.panels)))


@mpl.rc_context({"text.parse_math": False})  # names may hold dollar signs
def figures_of(records: Sequence[RunRecord], metric: str | None = None) -> dict[str, Figure]:
    """Return all figures with data, by name. Figures of a single run show `run_in_detail`.

    Args:
        records: records of the runs; the others are compared with the first.
        metric: metric to compare runs by; None takes one that all runs have.
    """
    record = run_in_detail(records)
    drawn: dict[str, Figure] = {}
    if record.steps:
        drawn["step_time"] = step_time(record)
        drawn["phases"] = phases(record)
    if record.events:
        drawn = {"depth": depth(record), **drawn}
    if record.evaluations:
        drawn = {"plasticity": plasticity(record), **drawn}
    if any(point.hits + point.advanced + point.misses for point in record.cache):
        drawn["cache"] = cache(record)
    drawn.update({found.name: panel(found) for found in record.panels})
    if len(records) > 1:
        drawn = {"accuracy": accuracy(records, metric), **drawn}
    return drawn


class _Picture(Figure):
    """A figure that every notebook shows, with any matplotlib back end."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=100)
        return stream.getvalue()


def _new(rows: int, share: bool = False) -> tuple[Figure, Sequence[Axes]]:
    # Not with pyplot, which keeps every figure until it is closed.
    figure = _Picture(figsize=(_WIDTH, _HEIGHT * (0.3 + 0.7 * rows)), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=share, squeeze=False)[:, 0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _color(row: int, count: int) -> Any:
    """Return the colour of one of several series; beyond those that are told apart, dark is in front."""
    return _OTHERS[row] if count <= len(_OTHERS) else _shade(row, count)


def _shade(row: int, count: int) -> Any:
    return mpl.colormaps["viridis"](0.9 * row / max(1, count - 1))  # its last tenth is too bright for a thin line


def _label(name: str, row: int, count: int) -> str | None:
    return name if count <= _MOST_NAMED or row in (0, count - 1) else None


def _make_logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Formulas are not drawn as such here. Within about a decade, powers of ten alone are one label, or none.
    narrow = high < 12 * low
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}" if narrow else "{x:.0e}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:.3g}") if narrow else NullFormatter())


def _draw_events(axes: Axes, record: RunRecord) -> None:
    for freezes, color in ((True, "#2b6cb0"), (False, "#c53030")):
        steps = [event["step"] for event in record.events if (event["kind"] == "freeze") is freezes]
        if steps:
            over = axes.get_xaxis_transform()  # from the bottom to the top, wherever the data are
            axes.vlines(steps, 0, 1, color=color, linewidth=0.8, linestyle="--", transform=over)


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]
