"""What a method shows of itself in a report: plain numbers, which `RunRecorder` keeps and ``egeria report`` draws."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lightning_egeria.core.training.methods import parts_of

LONGEST = 2000  # points of a series; beyond it, every second one is left out
MOST_POINTS, MOST_SERIES = 50_000, 512  # of a panel; many series have fewer points each

Real = Annotated[float, Meta(ge=-1e300, le=1e300)]
Name = Annotated[str, Meta(pattern=r"\A[a-z][a-z_]*\Z")]


class Panel(msgspec.Struct, forbid_unknown_fields=True):
    """One figure of a method.

    Points that are not finite are left out, and long series are thinned to `LONGEST` points at most.

    Attributes:
        name: of the figure, unlike those of all other figures.
        title: its heading.
        caption: a sentence or two below the heading.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        series: points by the name of their series. A line or bar has a place and a height; a span has a begin and an
            end, and each series is a row of its own, the first at the top.
        kind: ``"line"``, ``"bars"`` or ``"spans"``.
        log: whether the vertical axis is logarithmic.

    >>> Panel("size", "Batch size", "Samples a step.", "steps", "samples", {"size": [(0, 32), (9, math.nan)]}).series
    {'size': [(0, 32)]}
    """

    name: Name
    title: str
    caption: str
    x: str
    y: str
    series: Annotated[dict[str, list[tuple[Real, Real]]], Meta(max_length=MOST_SERIES)]
    kind: Literal["line", "bars", "spans"] = "line"
    log: bool = False

    def __post_init__(self) -> None:
        most = min(LONGEST, MOST_POINTS // max(len(self.series), 1))
        for name, points in self.series.items():
            kept = [point for point in points if all(map(math.isfinite, point))]
            while len(kept) > max(most, 2):
                kept = kept[:-1:2] + kept[-1:]
            self.series[name] = kept


def panels_of(trainer: Any) -> list[Panel]:
    """Return the panels of the methods in a Trainer that have points: what their ``panels()`` return."""
    found = [part.panels() for part in parts_of(trainer) if hasattr(part, "panels")]
    return [panel for panels in found for panel in panels if any(panel.series.values())]
