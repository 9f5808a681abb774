"""One self-contained HTML page of runs."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from lightning_egeria.report.drawing import common_metric, last_value, times_to_target
from lightning_egeria.report.record import RunRecord

_CAPTIONS: dict[str, tuple[str, str]] = {
    "accuracy": (
        "Accuracy against wall time",
        "The dotted line is what the first run ends with; circles mark when a run first has it.",
    ),
    "plasticity": (
        "Plasticity",
        "Change of each layer module since the reference was taken, and its slope; dark is the front of the network.",
    ),
    "depth": ("Frozen depth", "Layer modules that are frozen, from the front."),
    "step_time": ("Step time", "Means of neighbouring batches. Dashed lines: freezes blue, unfreezes red."),
    "phases": ("Where the time goes", "Means over all batches at these depths."),
    "cache": ("Cache", "Samples that came from the cached outputs of frozen layers, and samples that were computed."),
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; }
figure { margin: 2rem 0; background: #fff; color: #222; padding: 1rem; border: 1px solid #8884; border-radius: 6px; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: 14px; }
figcaption b { display: block; font-size: 16px; }
small { color: #888; }
"""


def page(records: Sequence[RunRecord], figures: Mapping[str, Figure], metric: str | None = None) -> str:
    """HTML with the figures inside, which needs no other file and no network.

    Args:
        records: of the runs.
        figures: as `lightning_egeria.report.figures` gives them for these.
        metric: that runs were compared by.
    """
    title = " and ".join(record.name for record in records)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{html.escape(title)}</h1>",
        _summary(records, metric),
    ]
    for name, figure in figures.items():
        heading, text = _CAPTIONS[name]
        parts.append(
            f"<figure>\n{_svg(figure, name)}\n<figcaption><b>{heading}</b> {html.escape(text)}</figcaption>\n</figure>"
        )
    parts += [_about(record) for record in records]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _summary(records: Sequence[RunRecord], metric: str | None) -> str:
    heads, *compared = _compared(records, metric)
    rows = [["run", "frozen", "ms per batch", "batches", "saved", *heads]]
    for record, more in zip(records, compared, strict=True):
        savings = record.savings or {}
        depth = record.events[-1]["depth"] if record.events else 0
        first, last = record.mean_times(0), record.mean_times(depth)
        times = " → ".join(f"{t.seconds * 1e3:.1f}" for t in (first, last if depth else None) if t is not None)
        saved = savings.get("seconds_saved")
        rows.append(
            [
                record.name,
                f"{depth}/{len(record.layer_modules)}" if record.layer_modules else "-",
                times or "-",
                str(sum(t.batches for t in record.steps)),
                f"{saved:.1f} s" if depth and saved is not None else "-",
                *more,
            ]
        )
    return _table(rows)


def _compared(records: Sequence[RunRecord], metric: str | None) -> list[list[str]]:
    """Further columns of the summary, a head and then a row for each run; empty if there is just one."""
    if len(records) < 2:
        return [[], *([] for _ in records)]
    name = metric or common_metric(records)
    found = [[f"last {name}", f"time to {records[0].name}'s"]]
    for record, reached in zip(records, times_to_target(records, name), strict=True):
        found.append([f"{last_value(record, name):.4f}", reached.note])
    return found


def _about(record: RunRecord) -> str:
    facts = "; ".join(f"{name} {value}" for name, value in record.about.items() if value)
    events = "".join(
        f"<li>step {int(event['step'])}: {html.escape(str(event['kind']))} to {int(event['depth'])}: "
        f"{html.escape(str(event['reason']))}</li>"
        for event in record.events
    )
    return f"<h2>{html.escape(record.name)}</h2>\n<ul>{events}</ul>\n<p><small>{html.escape(facts)}</small></p>"


def _table(rows: list[list[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _svg(figure: Figure, name: str) -> str:
    stream = io.StringIO()
    # Ids that differ from figure to figure, and are the same each time.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])
