"""Pictures of runs, drawn with matplotlib."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_egeria.errors import RecordError
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
    "advanced": ("#ffd92f", "from a shallower boundary"),
    "misses": ("#fc8d62", "computed"),
}
_WIDTH, _HEIGHT = 8.0, 3.2  # inches


def plasticity(record: RunRecord) -> Figure:
    """Plasticity and the size of its slope over the steps, a line for each layer module, front dark to back bright."""
    titles = {"plasticity": "plasticity", "slopes": "size of its slope"}
    # The one decision of fine-tuning is made without a slope.
    shown = [field for field in titles if any(any(getattr(point, field)) for point in record.evaluations)]
    figure, panels = _new(max(1, len(shown)), share=True)
    count = len(record.layer_modules)
    for axes, field in zip(panels, shown, strict=False):
        for index, name in enumerate(record.layer_modules):
            points = [(e.step, getattr(e, field)[index]) for e in record.evaluations if index < len(getattr(e, field))]
            drawn = [(step, abs(value)) for step, value in points if value]
            color = mpl.colormaps["viridis"](index / max(1, count - 1))
            label = name if count <= 8 or index in (0, count - 1) else None
            axes.plot(*_columns(drawn), color=color, linewidth=1, label=label)
        axes.set_yscale("log")
        axes.set_ylabel(titles[field])
        _draw_events(axes, record)
    if shown:
        panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    panels[-1].set_xlabel("optimizer steps")
    return figure


def depth(record: RunRecord) -> Figure:
    """How many layer modules are frozen, over the steps."""
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
    axes.set_ylabel(f"frozen of {len(record.layer_modules)} layer modules")
    axes.set_xlabel("optimizer steps")
    return figure


def step_time(record: RunRecord) -> Figure:
    """Milliseconds of a training batch over the steps, waiting for data included."""
    figure, (axes,) = _new(1)
    axes.plot([t.step for t in record.steps], [t.seconds * 1e3 for t in record.steps], linewidth=1, color="#2b6cb0")
    times = sorted(t.seconds * 1e3 for t in record.steps)
    if times:  # a few steps wait for something; they would hide the others
        axes.set_ylim(0, 1.5 * times[int(0.98 * (len(times) - 1))])
    _draw_events(axes, record)
    axes.set_ylabel("ms per batch")
    axes.set_xlabel("optimizer steps")
    return figure


def phases(record: RunRecord) -> Figure:
    """Where the time of a batch goes before the first freeze and at the last depth."""
    figure, (axes,) = _new(1)
    last = record.steps[-1].depth if record.steps else 0
    bars: dict[str, StepTimes] = {}
    for label, at in (("nothing frozen", 0), (f"{last} frozen", last)):
        mean = record.mean_times(at)
        if mean is not None:
            bars[label] = mean
    left = [0.0] * len(bars)
    for phase, title in PHASES.items():
        widths = [getattr(times, phase) * 1e3 for times in bars.values()]
        if any(width > 0 for width in widths):
            axes.barh(list(bars), widths, left=left, color=_COLORS[phase], label=title, height=0.5)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.1f} ms", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left, default=1.0) or 1.0)
    axes.set_xlabel("ms per batch")
    if bars:
        axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def cache(record: RunRecord) -> Figure:
    """Samples that came from the cache and samples that did not, and its size on disk, over the steps."""
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
    size = axes.twinx()
    size.plot(steps, [point.bytes_on_disk / 1e6 for point in record.cache], color="#333333", linestyle="--")
    size.set_ylabel("MB on disk (dashed)")
    size.set_ylim(bottom=0)
    if axes.collections:
        axes.legend(loc="upper left", fontsize=8, frameon=False)
    return figure


def accuracy(records: Sequence[RunRecord], metric: str | None = None) -> Figure:
    """A logged metric against wall time, a line for each run, with the time to what the first run ends with.

    Args:
        records: the first is the one that the others are compared with.
        metric: name; None takes one that all have, an accuracy if there is one.

    Raises:
        RecordError: the runs have no such metric in common.
    """
    metric = metric or common_metric(records)
    figure, (axes,) = _new(1)
    target = last_value(records[0], metric)
    for record, reached in zip(records, times_to_target(records, metric), strict=True):
        points = [(p.seconds, p.values[metric]) for p in record.metrics if metric in p.values]
        (line,) = axes.plot(*_columns(points), marker=".", label=f"{record.name}: {reached.note}")
        if reached.seconds is not None:
            axes.plot([reached.seconds], [target], "o", color=line.get_color(), markersize=8, fillstyle="none")
    axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of wall time, validation included")
    axes.set_ylabel(metric)
    axes.legend(fontsize=8, frameon=False, title=f"time to {target:.4g}", title_fontsize=8)
    return figure


@dataclasses.dataclass(frozen=True)
class Reached:
    """When a run first had what another one ends with.

    Attributes:
        seconds: of wall time; None: never.
        ratio: how many times sooner than the other had it itself; None if one of them never had it, or if nothing was
            frozen at that moment, so that the difference is the machine's.
        note: in words, for a picture.
    """

    seconds: float | None
    ratio: float | None
    note: str


def times_to_target(records: Sequence[RunRecord], metric: str) -> list[Reached]:
    """For each run, when it first had what the first run ends with.

    >>> from lightning_egeria.report.record import MetricPoint
    >>> plain = RunRecord("plain", metrics=[MetricPoint(1, 10.0, {"acc": 0.5}), MetricPoint(2, 20.0, {"acc": 0.8})])
    >>> ours = RunRecord("ours", metrics=[MetricPoint(1, 8.0, {"acc": 0.8}), MetricPoint(2, 14.0, {"acc": 0.7})])
    >>> [reached.note for reached in times_to_target([plain, ours], "acc")]
    ['20.0 s', '8.0 s, 2.50x']
    """
    target = last_value(records[0], metric)
    falls = "loss" in metric or "error" in metric
    found: list[Reached] = []
    for record in records:
        points = (point for point in record.metrics if metric in point.values)
        good = (p for p in points if (p.values[metric] <= target if falls else p.values[metric] >= target))
        first = next(good, None)
        if first is None:
            found.append(Reached(None, None, "not reached"))
        elif not found:
            found.append(Reached(first.seconds, 1.0, f"{first.seconds:.1f} s"))
        elif record.events and first.step <= record.events[0]["step"]:
            found.append(Reached(first.seconds, None, f"{first.seconds:.1f} s, before anything froze"))
        else:
            ratio = found[0].seconds / first.seconds if found[0].seconds and first.seconds else None
            found.append(Reached(first.seconds, ratio, f"{first.seconds:.1f} s" + (f", {ratio:.2f}x" if ratio else "")))
    return found


def common_metric(records: Sequence[RunRecord]) -> str:
    """The metric to compare runs by: one that all have logged, an accuracy before a loss, validation before training.

    Raises:
        RecordError: there is none.
    """
    names = [{name for point in record.metrics for name in point.values} for record in records]
    shared = set.intersection(*names) if names else set()
    if not shared:
        raise RecordError("the runs have no logged metric in common; log one in validation_step with self.log(...)")

    def preference(name: str) -> tuple[bool, bool, str]:
        return "train" in name, not any(word in name for word in ("acc", "f1", "iou", "bleu", "auroc")), name

    return min(shared, key=preference)


@mpl.rc_context({"text.parse_math": False})  # names are names, whatever stands between two dollar signs
def figures_of(records: Sequence[RunRecord], metric: str | None = None) -> dict[str, Figure]:
    """All pictures that the records have something for; those of one run are of the last that froze anything.

    Args:
        records: one or more; with more, the first is what the others are compared with.
        metric: to compare runs by.
    """
    record = next((r for r in reversed(records) if r.layer_modules), records[-1])
    drawn: dict[str, Figure] = {}
    if record.steps:
        drawn["step_time"] = step_time(record)
        drawn["phases"] = phases(record)
    if record.layer_modules:
        drawn = {"depth": depth(record), **drawn}
    if record.evaluations:
        drawn = {"plasticity": plasticity(record), **drawn}
    if any(point.hits + point.advanced + point.misses for point in record.cache):
        drawn["cache"] = cache(record)
    if len(records) > 1:
        drawn = {"accuracy": accuracy(records, metric), **drawn}
    return drawn


def last_value(record: RunRecord, metric: str) -> float:
    """What a run ends with.

    Raises:
        RecordError: it has not logged that metric.
    """
    values = [point.values[metric] for point in record.metrics if metric in point.values]
    if not values:
        known = sorted({name for point in record.metrics for name in point.values})
        raise RecordError(f"the run {record.name!r} has logged no {metric!r}; it has {known}")
    return values[-1]


class _Picture(Figure):
    """One that a notebook shows, whatever it has set up for matplotlib."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=100)
        return stream.getvalue()


def _new(rows: int, share: bool = False) -> tuple[Figure, Sequence[Axes]]:
    # Not by pyplot, which keeps every figure until it is closed.
    figure = _Picture(figsize=(_WIDTH, _HEIGHT * (1 if rows == 1 else 1.7)), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=share, squeeze=False)[:, 0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _draw_events(axes: Axes, record: RunRecord) -> None:
    for event in record.events:
        color = "#2b6cb0" if event["kind"] == "freeze" else "#c53030"
        axes.axvline(event["step"], color=color, linewidth=0.8, linestyle="--")


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]
