"""What the runs of the proof say of methods. `python -m benchmarks.proof.evidence` writes the file."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs import files

_FILE = Path(__file__).with_name("evidence.json")
_LARGEST = 2**20
# A method pays if, in the median over the tasks of a kind, it takes at most this share of the time, loses at most a
# point against the plain run, and ends at least a point above a plain run as short.
MOST_TIME, POINT, FEWEST_TASKS = 0.9, 1.0, 3


@functools.cache
def evidence() -> Mapping[str, Any]:
    """Return the content of the file: `comparisons` of runs with methods and plain ones, and what a cache costs."""
    content: Mapping[str, Any] = files.read_json(_FILE, _LARGEST)
    return content


def least(name: str, kind: str) -> float | None:
    """Return the smallest number of a column over the comparisons of a kind; None without any."""
    return min((one[name] for one in evidence()["comparisons"] if one["kind"] == kind), default=None)


def pays(kind: str, methods: Sequence[str]) -> tuple[bool, str]:
    """Return whether methods pay in runs of a kind, and the figures: medians over the tasks.

    Args:
        kind: of the runs, as of `Facts.kind`.
        methods: that were on together.
    """
    times = _by_task("time", kind, methods)
    if len(times) < FEWEST_TASKS:
        return False, _too_few(times)
    points, shorter = _by_task("points", kind, methods), _by_task("than_as_short", kind, methods)
    time, lost = statistics.median(times.values()), statistics.median(points.values())
    gained = statistics.median(shorter.values()) if shorter else 0.0
    found = time <= MOST_TIME and lost >= -POINT and gained >= POINT
    figures = f"{_range(times)} of the plain time, {lost:+.1f} points, {gained:+.1f} against a plain run as short"
    wanted = "" if found else f"; needed: {MOST_TIME} of the time, {-POINT:+.0f} and {POINT:+.0f} points"
    return found, figures + wanted


def cache_adds(kind: str, augmented: bool) -> tuple[bool, str]:
    """Return whether the cache pays beside freezing in runs of a kind, and the figures."""

    def times(methods: Sequence[str]) -> dict[str, float]:
        return _by_task("time", kind, methods, lambda one: one["augmented"] == augmented)

    alone, both = times(["freezing"]), times(["freezing", "cache"])
    ratios = {task: both[task] / time for task, time in alone.items() if task in both}
    if len(ratios) < FEWEST_TASKS:
        return False, _too_few(ratios)
    return statistics.median(ratios.values()) <= MOST_TIME, f"{_range(ratios)} of the time of freezing alone"


def _by_task(
    name: str, kind: str, methods: Sequence[str], which: Callable[[Mapping[str, Any]], bool] = lambda one: True
) -> dict[str, float]:
    """Return the mean of a column for each workload that has it."""
    found: dict[str, list[float]] = {}
    for one in evidence()["comparisons"]:
        if one["kind"] == kind and one["methods"] == [*methods] and one[name] is not None and which(one):
            found.setdefault(one["workload"], []).append(one[name])
    return {task: statistics.fmean(values) for task, values in found.items()}


def _range(shares: Mapping[str, float]) -> str:
    values = shares.values()
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f} on {len(values)} tasks)"


def _too_few(tasks: Mapping[str, float]) -> str:
    found = f"{len(tasks)} of the {FEWEST_TASKS} tasks needed to judge" if tasks else "none"
    return f"measured on {found}. Ask for it by name"
