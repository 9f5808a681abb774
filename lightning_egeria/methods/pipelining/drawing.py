"""Pictures of timelines, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_egeria.methods.pipelining.timeline import Timeline

_WIDTH, _ROW, _AROUND = 8.0, 0.22, 0.75  # inches
_FORWARD, _BACKWARD = "#8fb8de", "#f0b37e"
_MOST_LABELS = 200  # numbers of micro-batches in one drawing, beyond which they cannot be read


def timelines(drawn: Mapping[str, Timeline]) -> Figure:
    """Draw timelines below each other on one scale: a row for each rank, forwards in blue, backwards in orange.

    Args:
        drawn: timelines by title.
    """
    rows = [len(timeline.ranks) for timeline in drawn.values()]
    figure = Figure(figsize=(_WIDTH, _ROW * sum(rows) + _AROUND * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for one, (title, timeline) in zip(axes, drawn.items(), strict=True):
        labelled = sum(map(len, timeline.ranks)) <= _MOST_LABELS
        for rank, spans in enumerate(timeline.ranks):
            for span in spans:
                color = _FORWARD if span.action.kind == "F" else _BACKWARD
                length = span.end - span.start
                one.barh(rank, length * 1e3, left=span.start * 1e3, height=0.9, color=color, edgecolor="white")
                if labelled:
                    middle = (span.start + span.end) / 2 * 1e3
                    one.text(middle, rank, str(span.action.micro_batch), ha="center", va="center", fontsize=6)
        one.set_title(f"{title}: {timeline.seconds * 1e3:.0f} ms, idle {timeline.idle_share:.0%}", fontsize=9)
        one.set_ylabel("rank")
        one.set_yticks(range(len(timeline.ranks)))
        one.invert_yaxis()
    axes[-1].set_xlabel("ms" if not axes[-1].texts else "ms; numbers are those of micro-batches")
    key = [Patch(color=_FORWARD, label="forward"), Patch(color=_BACKWARD, label="backward")]
    figure.legend(handles=key, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure
