"""The page of `egeria-jobs serve`, as HTML: jobs, their state, log and curves. It needs nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_egeria.programs.files import read_json
from lightning_egeria.workflow.history import Row
from lightning_egeria.workflow.jobfolders import State
from lightning_egeria.workflow.listing import period

LARGEST_RECORD = 2**24
_WIDTH, _HEIGHT = 640, 180
_HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: #5a6475; }
td, th { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #e4e8ee; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 12rem; } main { overflow-x: auto; }
pre { background: #f5f7fa; padding: 1rem; overflow-x: auto; font-size: 13px; } a { color: #1a5fb4; }
.state { padding: .05rem .5rem; border-radius: .6rem; background: #e4e8ee; }
.done { background: #d6f0dd; } .running { background: #d5e5fb; } .failed { background: #fbdcd9; }
svg { background: #f5f7fa; display: block; } form { display: inline; margin-right: .5rem; }
"""


def jobs_page(rows: Sequence[Row], now: float, top: str = "/") -> str:
    """Return the page that lists jobs; ``top`` is its address on this machine."""
    lines = "".join(
        f'<tr><td><a href="{top}jobs/{row.id}">{row.id}</a></td><td>{html.escape(row.name)}</td><td>{_state(row)}</td>'
        f"<td>{row.backend}</td><td>{row.attempt}</td><td>{_duration(row, now)}</td>"
        f"<td>{html.escape(row.message)}</td></tr>"
        for row in rows
    )
    heads = "".join(f"<th>{head}</th>" for head in ("ID", "Name", "State", "Where", "Attempt", "For", "Note"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>" if rows else "<p>No job yet.</p>"
    return _page("Jobs", f"<h1>Jobs</h1>{table}", refresh=5)


def job_page(
    row: Row,
    now: float,
    log: str,
    explanation: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    top: str = "/",
    actions: bool = False,
) -> str:
    """Return the page of one job.

    Args:
        row: the job.
        now: seconds since 1970.
        log: end of its log.
        explanation: which methods are on, and why.
        curves: points of each metric.
        top: address of the page that lists jobs.
        actions: whether the page may cancel and resume it.
    """
    drawn = "".join(f"<h3>{html.escape(name)}</h3>{_curve(points)}" for name, points in curves.items())
    buttons = "".join(
        f'<form method="post" action="{top}jobs/{row.id}/{verb}"><button>{verb}</button></form>' for verb in _verbs(row)
    )
    body = (
        f'<p><a href="{top}">Jobs</a></p><h1>{row.id} {html.escape(row.name)} {_state(row)}</h1>'
        f"<p>{row.backend}, attempt {row.attempt}, {_duration(row, now)}. {html.escape(row.message)}</p>"
        f"{buttons if actions else ''}{f'<h2>Curves</h2>{drawn}' if drawn else ''}"
        f"<h2>Methods</h2><pre>{html.escape(explanation)}</pre>"
        f'<h2>Log</h2><p><a href="{top}jobs/{row.id}/log">whole log</a></p><pre>{html.escape(log)}</pre>'
    )
    return _page(f"{row.id} {row.name}", body)


def error_page(message: str, top: str = "/") -> str:
    """Return the page that says why something was not done; ``top`` is the address of the page that lists jobs."""
    return _page("Jobs", f'<p><a href="{top}">Jobs</a></p><h1>Not done</h1><p>{html.escape(message)}</p>')


def _verbs(row: Row) -> tuple[str, ...]:
    if not row.state.final:
        return ("cancel",)
    return () if row.state is State.DONE else ("resume",)


def curves_in(results: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the points (step, value) of each metric that a run of `egeria-train` has recorded; none without."""
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        for point in read_json(results / "egeria.json", LARGEST_RECORD)["metrics"]:
            for name, value in point["values"].items():
                if not name.startswith("egeria/") and math.isfinite(float(value)):
                    curves.setdefault(str(name), []).append((float(point["step"]), float(value)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}
    return curves


def _curve(points: Sequence[tuple[float, float]]) -> str:
    steps, values = zip(*points, strict=True)
    wide, high = max(steps) - min(steps) or 1.0, max(values) - min(values) or 1.0
    line = " ".join(
        f"{10 + (step - min(steps)) / wide * (_WIDTH - 20):.1f},"
        f"{_HEIGHT - 10 - (value - min(values)) / high * (_HEIGHT - 20):.1f}"
        for step, value in points
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f'<polyline points="{line}" fill="none" stroke="#1a5fb4" stroke-width="2"/></svg>'
        f"<p>step {min(steps):g} to {max(steps):g}; {min(values):.4g} to {max(values):.4g}; last {values[-1]:.4g}</p>"
    )


def _state(row: Row) -> str:
    return f'<span class="state {row.state.value}">{row.state.value}</span>'


def _duration(row: Row, now: float) -> str:
    return period(max((row.ended or now) - (row.started or row.submitted), 0.0))


def _page(title: str, body: str, refresh: int | None = None) -> str:
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><head>{_HEAD}{again}<title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><main>{body}</main></body></html>"
    )
