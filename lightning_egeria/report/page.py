"""A self-contained HTML page of runs."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from lightning_egeria.report.comparison import summary, why_nothing_froze
from lightning_egeria.report.drawing import run_in_detail
from lightning_egeria.report.record import RunRecord

_CAPTIONS: dict[str, tuple[str, str]] = {
    "accuracy": (
        "Accuracy against wall time",
        "Dotted line: final value of the first run. Circles: when each run first reaches it.",
    ),
    "plasticity": (
        "Plasticity",
        "Plasticity of each layer module, and its slope with SlopePolicy. Dark is the front of the network.",
    ),
    "depth": ("Frozen depth", "Number of frozen layer modules."),
    "step_time": (
        "Step time",
        "Dashed lines: freezes in blue, unfreezes in red. A long run shows means of neighbouring batches.",
    ),
    "phases": ("Where the time goes", "Mean over the middle half of the batches at each depth, sorted by time."),
    "cache": ("Cache", "Samples read from the cache, and samples computed."),
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; width: 100%; }
td, th { padding: .2rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid #8884; }
td:not(:first-child) { white-space: nowrap; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
td:first-child, code { overflow-wrap: anywhere; }
figure { margin: 2rem 0; background: #fff; color: #222; padding: 1rem; border: 1px solid #8884; border-radius: 6px; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: 14px; }
figcaption b { display: block; font-size: 16px; }
dt { color: #888; float: left; width: 6rem; }
dd { margin-left: 7rem; }
"""


def page(records: Sequence[RunRecord], figures: Mapping[str, Figure], metric: str | None = None) -> str:
    """Return HTML with the figures inside; it needs no other file and no network.

    Args:
        records: records of the runs.
        figures: figures of these runs, from `lightning_egeria.report.figures`.
        metric: metric that the runs are compared by.
    """
    alone = len(records) == 1
    title = f"Run {records[0].name}" if alone else f"{len(records)} runs compared"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{html.escape(title)}</h1>",
        _table(summary(records, metric)),
        *(_notice(record, alone) for record in records),
    ]
    whose = "" if alone else f": {run_in_detail(records).name}"
    captions = _CAPTIONS | {panel.name: (panel.title, panel.caption) for panel in run_in_detail(records).panels}
    for name, figure in figures.items():
        heading, text = captions[name]
        heading += whose if name != "accuracy" else ""
        caption = f"<b>{html.escape(heading)}</b> {html.escape(text)}"
        parts.append(f"<figure>\n{_svg(figure, name)}\n<figcaption>{caption}</figcaption>\n</figure>")
    parts += [_about(record, alone) for record in records]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _notice(record: RunRecord, alone: bool) -> str:
    reason = why_nothing_froze(record)
    if reason is None:
        return ""
    where = "" if alone else f" in {html.escape(record.name)}"
    return f"<p><b>Nothing froze{where}.</b> {html.escape(reason)}</p>"


def _about(record: RunRecord, alone: bool) -> str:
    events = "".join(
        f"<li>step {event['step']}: {html.escape(event['kind'])} to {event['depth']}: "
        f"{html.escape(event['reason'])}</li>"
        for event in record.events
    )
    facts = "".join(
        f"<dt>{html.escape(name)}</dt><dd><code>{html.escape(value)}</code></dd>"
        for name, value in {"settings": " ".join(record.overrides), **record.about}.items()
        if value
    )
    heading = "" if alone else f"<h2>{html.escape(record.name)}</h2>\n"
    events = f"<ul>{events}</ul>\n" if events else ""
    return f"{heading}{events}<details><summary>Details of the run</summary>\n<dl>{facts}</dl>\n</details>"


def _table(rows: list[list[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _svg(figure: Figure, name: str) -> str:
    stream = io.StringIO()
    # Ids must differ between figures, and be the same each time.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])
