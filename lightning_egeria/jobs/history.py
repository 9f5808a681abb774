"""All jobs that were submitted, and what runs have cost, in one SQLite file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs import files
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.jobfolders import JobFolder, State, Status
from lightning_egeria.jobs.optimisations import Measured

_TABLES = """
CREATE TABLE IF NOT EXISTS submitted (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, run TEXT NOT NULL, backend TEXT NOT NULL,
    address TEXT NOT NULL, submitted REAL NOT NULL, priority INTEGER NOT NULL, devices INTEGER NOT NULL,
    most_devices INTEGER, after TEXT NOT NULL, cost_key TEXT NOT NULL,
    node TEXT NOT NULL DEFAULT '', given INTEGER NOT NULL DEFAULT 0, handle TEXT NOT NULL DEFAULT '', closed REAL);
CREATE INDEX IF NOT EXISTS submitted_by_end ON submitted (closed);
CREATE TABLE IF NOT EXISTS durations (key TEXT PRIMARY KEY, fit_s REAL NOT NULL, epochs INTEGER NOT NULL);
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One job of the history. Its state is what the status file in its folder says; no other place has it.

    Attributes:
        id: of the job.
        name: of the job.
        run: path of the run directory.
        backend: where it runs.
        address: of the Ray cluster; empty elsewhere.
        submitted: in seconds since 1970.
        priority: higher goes first.
        devices: how many it asks for.
        most_devices: how many it can use; None if it runs on ``devices`` only.
        after: ids of the jobs that must be done first.
        cost_key: key of its costs; empty if no policy reads them.
        node: name of the machine on which the queue has given it devices; empty while it has none.
        given: number of these devices.
        handle: the name that Slurm or Ray gave it; its devices on this machine.
        closed: when it was noted that it has ended, in seconds since 1970; None until then.
        status: of the job, as its folder had it when the row was read.
    """

    id: int
    name: str
    run: str
    backend: str
    address: str
    submitted: float
    priority: int
    devices: int
    most_devices: int | None
    after: tuple[int, ...]
    cost_key: str
    node: str
    given: int
    handle: str
    closed: float | None
    status: Status

    @property
    def state(self) -> State:
        """Where the job is."""
        return self.status.state

    def content(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        content = dataclasses.asdict(self)
        status = content.pop("status")
        return {**content, **status, "state": self.state.value}


_NO_ID = 2**63  # beyond the integers of SQLite
_COLUMNS = [field.name for field in dataclasses.fields(Row) if field.name != "status"]


class History:
    """The history of jobs. Processes on one machine may share it.

    Args:
        path: SQLite file; made if it does not exist.
        jobs: folder of the folders of the jobs, which have their states.

    Raises:
        QueueError: it cannot be opened.
    """

    def __init__(self, path: Path, jobs: Path) -> None:
        self.path, self.jobs = path, jobs
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
        except BaseException:  # a signal too; it is raised again
            if self._database.in_transaction:  # SQLite has left it itself when the disk is full
                with self._errors():
                    self._database.execute("ROLLBACK")
            raise
        with self._errors():
            self._database.execute("COMMIT")

    def add(self, job: Mapping[str, Any], run: Path, backend: str, address: str = "", after: Sequence[int] = ()) -> int:
        """Add a job and return its id. Within a `transaction`."""
        resources = job["resources"]
        values = (
            *(job["name"], str(run), backend, address, time.time(), job["queue"]["priority"], resources["devices"]),
            *(resources["most_devices"], json.dumps([*after]), job.get("cost_key") or ""),
        )
        with self._errors():
            cursor = self._database.execute(
                "INSERT INTO submitted (name, run, backend, address, submitted, priority, devices, most_devices, "
                "after, cost_key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def update(self, id: int, **values: Any) -> None:
        """Set columns of a job."""
        names = ", ".join(f"{name} = ?" for name in values)
        with self._errors():
            self._database.execute(f"UPDATE submitted SET {names} WHERE id = ?", (*values.values(), id))

    def get(self, id: int) -> Row:
        """Return one job.

        Raises:
            QueueError: there is none with this id.
        """
        for row in self._rows("WHERE id = ?", id) if id < _NO_ID else ():
            return row
        raise QueueError(f"there is no job {id}. `egeria jobs ps` lists them")

    def remove(self, id: int) -> None:
        """Forget a job. Within a `transaction`."""
        with self._errors():
            self._database.execute("DELETE FROM submitted WHERE id = ?", (id,))

    def unfinished(self, backend: str | None = None) -> list[Row]:
        """Return the jobs whose end was not noted, in the order of submission."""
        where = "WHERE closed IS NULL" + (" AND backend = ?" if backend else "") + " ORDER BY id"
        return self._rows(where, *([backend] if backend else []))

    def finished(self, most: int) -> list[Row]:
        """Return the latest jobs that have ended, the latest first."""
        return self._rows("WHERE closed IS NOT NULL ORDER BY id DESC LIMIT ?", most)

    def runs_since(self, since: float) -> set[str]:
        """Return the run directories of the jobs that have not ended, or ended after a moment."""
        with self._errors():
            rows = self._database.execute(
                "SELECT DISTINCT run FROM submitted WHERE closed IS NULL OR closed > ?", (since,)
            )
            return {run for (run,) in rows}

    def cost(self, key: str) -> Measured | None:
        """Return what an earlier run cost; None without one."""
        with self._errors():
            row = self._database.execute("SELECT fit_s, epochs FROM durations WHERE key = ?", (key,)).fetchone()
        return Measured(*row) if row else None

    def keep_cost(self, key: str, cost: Measured) -> None:
        """Keep what a run has cost, in place of an earlier one."""
        with self._errors():
            self._database.execute("INSERT OR REPLACE INTO durations VALUES (?, ?, ?)", (key, cost.fit_s, cost.epochs))

    def _rows(self, where: str, *values: Any) -> list[Row]:
        with self._errors():
            rows = self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM submitted {where}", values).fetchall()
        named = (dict(zip(_COLUMNS, row, strict=True)) for row in rows)
        return [
            Row(
                **{**row, "after": tuple(json.loads(row["after"]))},
                status=JobFolder(self.jobs / str(row["id"])).status(),
            )
            for row in named
        ]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise QueueError(f"cannot use the history {self.path}: {error}") from error
