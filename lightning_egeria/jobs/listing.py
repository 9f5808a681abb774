"""The table of `egeria jobs ps`, as plain text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs.terminal import printable, shortened, wrapped
from lightning_egeria.errors import JobError
from lightning_egeria.jobs.history import Row
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.rundirs import explanation_in, read_run_directory

_HEADS = ("ID", "NAME", "STATE", "WHERE", "ATTEMPT", "FOR", "NOTE")
_NAME, _SHORTEST = 1, 8  # place of the names; columns that are used even if there are fewer
_SILENT_S = 30.0  # since the last heart-beat


def table(rows: Sequence[Row], home: Home, width: int | None = None) -> list[str]:
    """Return the jobs, one a line, below their heads.

    Args:
        rows: the jobs.
        home: of the jobs.
        width: columns that there are; names and notes are shortened to fit. None leaves them as long as they are.
    """
    now = time.time()
    lines = [_HEADS, *(_cells(row, home, now) for row in rows)]
    *widths, longest = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is not None:
        room = width - sum(widths) + widths[_NAME] - 2 * len(widths)  # for names and notes
        widths[_NAME] = min(widths[_NAME], max(room - longest, room // 2, _SHORTEST))
        longest = max(room - widths[_NAME], _SHORTEST)
    padded = ([shortened(cell, wide).ljust(wide) for cell, wide in zip(line, widths, strict=False)] for line in lines)
    return [
        "  ".join([*cells, note if len(note) <= longest else note[: longest - 1] + "…"]).rstrip()
        for cells, (*_, note) in zip(padded, lines, strict=True)
    ]


def details(row: Row, home: Home) -> dict[str, Any]:
    """Return what is known of a job, as plain values by name."""
    folder, content = home.folder(row.id), row.content()
    found = {name: value for name, value in content.items() if value not in ("", None, (), 0) and name != "cost_key"}
    for name in ("submitted", "started", "ended", "closed"):
        if isinstance(moment := found.pop(name, None), int | float) and name != "closed":
            found[name] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    if "service" in found:
        found["service"] = round(found["service"], 1)
    found |= {"log": str(folder.log), "checkpoints": str(folder.checkpoints), "results": str(folder.results)}
    with contextlib.suppress(OSError, ValueError):  # the run directory was evicted
        found["methods"] = explanation_in(Path(row.run)).splitlines()
    with contextlib.suppress(JobError):
        entry = read_run_directory(Path(row.run))["entry"]
        found["entry"] = entry["command"] or f"{entry['experiment']}: {' '.join(entry['overrides'])}"
    return found


def as_text(found: Mapping[str, Any], width: int | None = None) -> Iterator[str]:
    """Yield the lines of what is known of a job, at most ``width`` columns wide where no word or path is longer."""
    indent = max(map(len, found)) + 2
    for name, value in found.items():
        text = "\n".join(map(printable, value if isinstance(value, list | tuple) else [value]))
        lines = (text if width is None else wrapped(text, width - indent, then="")).split("\n")
        for place, line in enumerate(lines):
            yield f"{name if not place else '':{indent}}{line}"


def period(seconds: float) -> str:
    """Return a time span in its largest two units.

    >>> period(5), period(125), period(7300), period(200000)
    ('5s', '2m 5s', '2h 1m', '2d 7h')
    """
    rest = int(seconds)
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if rest >= size or (unit == "s" and not parts):
            parts.append(f"{rest // size}{unit}")
            rest %= size
    return " ".join(parts[:2])


def _cells(row: Row, home: Home, now: float) -> tuple[str, ...]:
    status = row.status
    note = status.message
    if row.state is State.RUNNING:
        silent = home.folder(row.id).since_beat()
        if silent is not None and silent > _SILENT_S:
            note = f"no heart-beat for {period(silent)}"
        elif row.most_devices is not None:
            note = f"on {status.devices} of at most {row.most_devices} devices"
    elif row.state is State.QUEUED and row.after:
        note = f"after {', '.join(map(str, row.after))}"
    since = (status.ended or now) - status.started if status.started is not None else now - row.submitted
    cells = (str(row.id), row.name, row.state.value, row.backend, str(status.attempt), period(max(since, 0)), note)
    return tuple(map(printable, cells))
