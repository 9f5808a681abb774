"""Comparing runs: their last metrics, their times, and the time to equal quality."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_egeria.core.programs.terminal import printable
from lightning_egeria.errors import RecordError
from lightning_egeria.report.naming import LONGEST_NAME
from lightning_egeria.report.record import RunRecord

_RISING = ("acc", "f1", "iou", "bleu", "auroc")


@dataclasses.dataclass(frozen=True)
class Reached:
    """When a run first reaches the final value of another.

    Attributes:
        seconds: seconds of wall time; None if it never does.
        ratio: the other run's seconds to that value, divided by ``seconds``. None if one of them never reaches it, or
            if nothing was frozen by then, so that the difference comes from the machine.
        note: text for a figure.
    """

    seconds: float | None
    ratio: float | None
    note: str


def times_to_target(records: Sequence[RunRecord], metric: str) -> list[Reached]:
    """Return when each run first reaches the final value of the first run.

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
            continue
        time = f"{first.seconds:.1f} s"
        if not found:
            found.append(Reached(first.seconds, 1.0, time))
        elif record.layer_modules and not record.events:
            found.append(Reached(first.seconds, None, f"{time}, nothing froze"))
        elif record.events and first.step <= record.events[0]["step"]:
            found.append(Reached(first.seconds, None, f"{time}, before anything froze"))
        else:
            ratio = found[0].seconds / first.seconds if found[0].seconds and first.seconds else None
            found.append(Reached(first.seconds, ratio, time + (f", {ratio:.2f}x" if ratio else "")))
    return found


def common_metric(records: Sequence[RunRecord]) -> str:
    """Return a metric that all runs logged: an accuracy rather than a loss, validation rather than training.

    Raises:
        RecordError: if there is none.
    """
    names = [{name for point in record.metrics for name in point.values} for record in records]
    shared = set.intersection(*names) if names else set()
    if not shared:
        raise RecordError("the runs have no logged metric in common. Log one in validation_step with self.log(...)")

    def preference(name: str) -> tuple[bool, bool, str]:
        return "train" in name, not any(word in name for word in _RISING), name

    return min(shared, key=preference)


def last_value(record: RunRecord, metric: str) -> float:
    """Return the last value of a metric.

    Raises:
        RecordError: if the run did not log it.
    """
    values = [point.values[metric] for point in record.metrics if metric in point.values]
    if not values:
        known = sorted({name for point in record.metrics for name in point.values})
        raise RecordError(f"the run {record.name!r} logged no {metric!r}; it logged {known}")
    return values[-1]


def why_nothing_froze(record: RunRecord) -> str | None:
    """Return the reason in one or two sentences; None if the run froze something, or had no freezing callback."""
    if record.events or not record.layer_modules:
        return None
    if record.savings is None:
        return "The run ended before its summary was written."
    reason = record.savings.why_nothing_froze
    return f"{reason[:1].upper()}{reason[1:]}." if reason is not None else "The record gives no reason."


def summary(records: Sequence[RunRecord], metric: str | None = None) -> list[list[str]]:
    """Return a table of the runs: a header row, then one row per run.

    Args:
        records: records of the runs; the others are compared with the first.
        metric: metric to compare them by; None is `common_metric`.

    Raises:
        RecordError: if the runs have no such metric in common.
    """
    rows = [["run", "frozen", "ms per batch", "time"], *(_facts(record) for record in records)]
    if len(records) == 1:
        saved = records[0].savings.seconds_saved if records[0].savings is not None else None
        rows[0].append("estimated saving")
        rows[1].append(f"{saved:.1f} s" if records[0].events and saved is not None else "-")
        return rows
    metric = metric or common_metric(records)
    rows[0] += [metric, f"time to {last_value(records[0], metric):.4g}"]
    for row, record, one in zip(rows[1:], records, times_to_target(records, metric), strict=True):
        ratio = f" ({one.ratio:.2f}x)" if one.ratio is not None and record is not records[0] else ""
        reached = "not reached" if one.seconds is None else f"{one.seconds:.1f} s{ratio}"
        row += [f"{last_value(record, metric):.4f}", reached]
    return rows


def summary_of(record: RunRecord) -> dict[str, Any]:
    """Return the facts of one run as plain values, for JSON."""
    metrics: dict[str, float] = {}
    for point in record.metrics:
        metrics |= point.values
    return {
        "run": record.name,
        "frozen": record.events[-1]["depth"] if record.events else 0,
        "layer_modules": len(record.layer_modules),
        "seconds": record.metrics[-1].seconds if record.metrics else None,
        "seconds_saved": record.savings.seconds_saved if record.savings is not None else None,
        "metrics": metrics,
    }


def summary_table(records: Sequence[RunRecord], metric: str | None = None) -> Table:
    """Return the `summary` as a table for the terminal."""
    heads, *rows = summary(records, metric)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    widest = max(len(row[0]) for row in rows)
    table.add_column(heads[0], overflow="fold", min_width=min(widest, LONGEST_NAME // 3))
    for head in heads[1:]:
        table.add_column(Text(printable(head)), justify="right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # a name may look like markup
    return table


def _facts(record: RunRecord) -> list[str]:
    depth = record.events[-1]["depth"] if record.events else 0
    first, last = record.typical_times(0), record.typical_times(depth) if depth else None
    times = " → ".join(f"{typical.seconds * 1e3:.1f}" for typical in (first, last) if typical is not None)
    return [
        record.name,
        f"{depth}/{len(record.layer_modules)}" if record.layer_modules else "-",
        times or "-",
        f"{record.metrics[-1].seconds:.1f} s" if record.metrics else "-",
    ]
