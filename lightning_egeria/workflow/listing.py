"""The table of `egeria-jobs ps`, as plain text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_egeria.programs.terminal import printable
from lightning_egeria.workflow.history import Row
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.jobfolders import State

_HEADS = ("ID", "NAME", "STATE", "WHERE", "ATTEMPT", "FOR", "NOTE")
_SILENT_S = 30.0  # since the last heart-beat


def table(rows: Sequence[Row], home: Home) -> str:
    """Return the jobs, one a line, below their heads."""
    now = time.time()
    lines = [_HEADS, *(_cells(row, home, now) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADS) - 1)]
    padded = [[*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]] for line in lines]
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)


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
    note, attempt = row.message, row.attempt
    if row.state is State.RUNNING:
        folder = home.folder(row.id)
        attempt, silent = max(attempt, folder.status().attempt), folder.since_beat()
        if silent is not None and silent > _SILENT_S:
            note = f"no heart-beat for {period(silent)}"
    elif row.state is State.QUEUED and row.after:
        note = f"after {', '.join(map(str, row.after))}"
    since = (row.ended or now) - row.started if row.started is not None else now - row.submitted
    cells = (str(row.id), row.name, row.state.value, row.backend, str(attempt), period(max(since, 0)), note)
    return tuple(map(printable, cells))
