"""The table of `egeria jobs ps`, as plain text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs.terminal import printable
from lightning_egeria.errors import JobError
from lightning_egeria.jobs.history import Row
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.rundirs import explanation_in, read_run_directory

_HEADS = ("ID", "NAME", "STATE", "WHERE", "ATTEMPT", "FOR", "NOTE")
_SILENT_S = 30.0  # since the last heart-beat


def table(rows: Sequence[Row], home: Home) -> list[str]:
    """Return the jobs, one a line, below their heads."""
    now = time.time()
    lines = [_HEADS, *(_cells(row, home, now) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADS) - 1)]
    padded = [[*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]] for line in lines]
    return ["  ".join(line).rstrip() for line in padded]


def details(row: Row, home: Home) -> dict[str, Any]:
    """Return what is known of a job, as plain values by name."""
    folder, content = home.folder(row.id), row.content()
    found = {name: value for name, value in content.items() if value not in ("", None, (), 0) and name != "cost_key"}
    for name in ("submitted", "started", "ended", "closed"):
        if isinstance(moment := found.pop(name, None), int | float) and name != "closed":
            found[name] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    found |= {"log": str(folder.log), "checkpoints": str(folder.checkpoints), "results": str(folder.results)}
    with contextlib.suppress(OSError, ValueError):  # the run directory was evicted
        found["methods"] = explanation_in(Path(row.run)).splitlines()
    with contextlib.suppress(JobError):
        entry = read_run_directory(Path(row.run))["entry"]
        found["entry"] = entry["command"] or f"{entry['experiment']}: {' '.join(entry['overrides'])}"
    return found


def as_text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of what is known of a job."""
    width = max(map(len, found))
    for name, value in found.items():
        for place, line in enumerate(value if isinstance(value, list) else [value]):
            yield f"{name if not place else '':{width}}  {printable(line)}"


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
