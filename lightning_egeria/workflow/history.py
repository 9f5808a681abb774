"""All jobs that were ever submitted, and what runs have cost, in one SQLite file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.errors import QueueError
from lightning_egeria.programs import files
from lightning_egeria.workflow.jobfolders import State
from lightning_egeria.workflow.optimisations import Measured

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, run TEXT NOT NULL, backend TEXT NOT NULL,
    state TEXT NOT NULL, submitted REAL NOT NULL, started REAL, ended REAL, attempt INTEGER NOT NULL DEFAULT 0,
    message TEXT NOT NULL DEFAULT '', priority INTEGER NOT NULL DEFAULT 0, share TEXT NOT NULL DEFAULT '',
    devices INTEGER NOT NULL DEFAULT 1, after TEXT NOT NULL DEFAULT '[]', handle TEXT NOT NULL DEFAULT '',
    cost_key TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state);
CREATE INDEX IF NOT EXISTS jobs_by_start ON jobs (started);
CREATE TABLE IF NOT EXISTS costs (
    key TEXT PRIMARY KEY,
    fit_s REAL NOT NULL, epochs INTEGER NOT NULL, data REAL NOT NULL, communication REAL NOT NULL);
"""
_OPEN = "('queued', 'running', 'preempted', 'lost')"


@dataclasses.dataclass(frozen=True)
class Row:
    """One job of the history.

    Attributes:
        id: of the job.
        name: of the job.
        run: path of the run directory.
        backend: where it runs.
        state: the latest that is known.
        submitted: in seconds since 1970; so are ``started`` and ``ended`` of the latest attempt.
        attempt: number of starts.
        message: what went wrong.
        priority: higher goes first.
        share: whose fair share it uses.
        devices: how many it needs.
        after: ids of the jobs that must be done first.
        handle: the name that Slurm or Ray gave it.
        cost_key: key of what it costs; empty if nobody asks.
    """

    id: int
    name: str
    run: str
    backend: str
    state: State
    submitted: float
    started: float | None
    ended: float | None
    attempt: int
    message: str
    priority: int
    share: str
    devices: int
    after: tuple[int, ...]
    handle: str
    cost_key: str

    def content(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**dataclasses.asdict(self), "state": self.state.value}


_NO_ID = 2**63  # beyond the integers of SQLite
_COLUMNS = ", ".join(field.name for field in dataclasses.fields(Row))


class History:
    """The history of jobs. Processes on one machine may share it.

    Args:
        path: SQLite file; made if it does not exist.

    Raises:
        QueueError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._errors():
            files.make_own(path)  # SQLite would take the umask, and would follow a link
            # Transactions are begun by hand: which lock they take matters.
            self._database = sqlite3.connect(path, timeout=30, isolation_level=None)
            self._database.executescript(_TABLES)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the history: what others write waits; all of this happens, or nothing does."""
        with self._errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:  # a signal too; it goes on
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def add(self, job: Mapping[str, Any], run: Path, backend: str, share: str, after: Sequence[int] = ()) -> int:
        """Add a job and return its id. Within a `transaction`."""
        with self._errors():
            values = (
                *(job["name"], str(run), backend, State.QUEUED.value, time.time(), job["queue"]["priority"], share),
                *(job["resources"]["devices"], json.dumps([*after]), job.get("cost_key") or ""),
            )
            cursor = self._database.execute(
                "INSERT INTO jobs (name, run, backend, state, submitted, priority, share, devices, after, cost_key) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def update(self, id: int, **values: Any) -> None:
        """Set columns of a job."""
        names = ", ".join(f"{name} = ?" for name in values)
        with self._errors():
            self._database.execute(f"UPDATE jobs SET {names} WHERE id = ?", (*values.values(), id))

    def get(self, id: int) -> Row:
        """Return one job.

        Raises:
            QueueError: there is none with this id.
        """
        for row in self._rows("WHERE id = ?", id) if id < _NO_ID else ():
            return row
        raise QueueError(f"there is no job {id}. `egeria-jobs ps` lists them")

    def unfinished(self, backend: str | None = None) -> list[Row]:
        """Return the jobs that have not ended, in the order of submission."""
        where = f"WHERE state IN {_OPEN}" + (" AND backend = ?" if backend else "") + " ORDER BY id"
        return self._rows(where, *([backend] if backend else []))

    def finished(self, most: int) -> list[Row]:
        """Return the latest jobs that have ended, the latest first."""
        return self._rows(f"WHERE state NOT IN {_OPEN} ORDER BY id DESC LIMIT ?", most)

    def runs_since(self, since: float) -> set[str]:
        """Return the run directories of the jobs that have not ended, or ended after a moment."""
        with self._errors():
            rows = self._database.execute(
                f"SELECT DISTINCT run FROM jobs WHERE state IN {_OPEN} OR COALESCE(ended, submitted) > ?", (since,)
            )
            return {run for (run,) in rows}

    def usage(self, since: float) -> dict[str, float]:
        """Return the device-seconds of each share, of attempts that started after a moment."""
        now = time.time()
        with self._errors():
            rows = self._database.execute(
                "SELECT share, SUM(devices * (COALESCE(ended, ?) - started)) FROM jobs "
                "WHERE started > ? AND backend = 'local' GROUP BY share",
                (now, since),
            ).fetchall()
        return dict(rows)

    def cost(self, key: str) -> Measured | None:
        """Return what an earlier run cost; None without one."""
        with self._errors():
            row = self._database.execute(
                "SELECT fit_s, epochs, data, communication FROM costs WHERE key = ?", (key,)
            ).fetchone()
        return Measured(*row) if row else None

    def keep_cost(self, key: str, cost: Measured) -> None:
        """Keep what a run has cost, in place of an earlier one."""
        with self._errors():
            self._database.execute(
                "INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?)",
                (key, cost.fit_s, cost.epochs, cost.data, cost.communication),
            )

    def _rows(self, where: str, *values: Any) -> list[Row]:
        with self._errors():
            rows = self._database.execute(f"SELECT {_COLUMNS} FROM jobs {where}", values).fetchall()
        named = (dict(zip(_COLUMNS.split(", "), row, strict=True)) for row in rows)
        return [Row(**{**row, "state": State(row["state"]), "after": tuple(json.loads(row["after"]))}) for row in named]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise QueueError(f"cannot use the history {self.path}: {error}") from error
