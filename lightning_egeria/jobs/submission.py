"""Handing jobs over, ending them, resuming them."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_egeria.core.programs import files
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.compiler import Compiled
from lightning_egeria.jobs.endings import note_end
from lightning_egeria.jobs.history import History, Row
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import JobFolder, State, Submission


class Backend(Protocol):
    """Where jobs run.

    Attributes:
        name: of the back end.
        address: of the cluster, if several may be named.
        queued: whether the queue of the home decides when and where its jobs run.
    """

    name: str
    address: str
    queued: bool

    def check(self, compiled: Compiled) -> None:
        """Refuse a job that cannot run here.

        Raises:
            QueueError: with the reason.
        """

    def start(self, jobs: Sequence[tuple[Row, JobFolder]]) -> Mapping[int, str]:
        """Hand jobs over; returns the name that the back end gives each."""

    def cancel(self, row: Row) -> None:
        """End a job that runs or waits there."""

    def lost(self, rows: Sequence[Row]) -> set[int]:
        """Return the ids of the jobs that the back end does not know any more."""


def submit(
    home: Home,
    history: History,
    backend: Backend,
    compiled: Sequence[Compiled],
    origin: Path,
    after: Sequence[int] = (),
) -> list[int]:
    """Hand compiled jobs over, and return their ids.

    Args:
        home: where jobs live.
        history: of the home.
        backend: where they run.
        compiled: of one description.
        origin: folder of the description.
        after: ids of jobs that must be done first, beside those of the description.

    Raises:
        QueueError: the back end refuses one, a job to wait for does not exist, or the disk is full.
    """
    for one in compiled:
        backend.check(one)
    rows, folders = [], []
    with history.transaction():
        for one in compiled:
            waits = sorted({*after, *map(int, one.job["queue"]["after"])})
            handles = _handles(history, backend, waits)
            id = history.add({**one.job, "name": one.name}, one.path, backend.name, backend.address, waits)
            submission = Submission(id, one.name, str(one.path), str(origin.absolute()), backend.name, sys.executable)
            folder = JobFolder.create(home.jobs / str(id), submission)
            files.write_whole(folder.path / "after", "\n".join(handles), files.PRIVATE)
            folders.append(folder)
            rows.append(history.get(id))
    _hand_over(history, backend, list(zip(rows, folders, strict=True)))
    return [row.id for row in rows]


def cancel(home: Home, history: History, backend: Backend, id: int) -> str:
    """End a job, and return what happens now.

    Raises:
        QueueError: there is no such job.
    """
    folder = home.folder(id)
    with history.transaction():
        row = history.get(id)
        if row.state.final:
            return f"job {id} has ended already: {row.state}"
        if waits := row.state is not State.RUNNING and not row.node:
            status = folder.status()
            status.state, status.ended = State.CANCELLED, time.time()
            folder.write_status(status)
            note_end(history, id)
    folder.ask(State.CANCELLED)
    backend.cancel(row)
    return f"job {id} is cancelled" if waits else f"job {id} is asked to end"


def resume(home: Home, history: History, backend: Backend, id: int) -> None:
    """Let a job that has failed or was cancelled resume from its last checkpoint.

    Raises:
        QueueError: there is no such job, it is done, or it has not ended.
    """
    folder = home.folder(id)
    with history.transaction():
        row = history.get(id)
        if row.state is State.DONE:
            raise QueueError(f"job {id} is done. Submit it again to run it again")
        if not row.state.final or folder.is_watched:
            raise QueueError(f"job {id} has not ended: it is {row.state}")
        folder.revive()
        folder.tell("schedule", "resumed")
        history.update(id, closed=None, node="", given=0, handle="")
    _hand_over(history, backend, [(history.get(id), folder)])


def remove(home: Home, history: History, id: int) -> None:
    """Forget a job that has ended, and remove its folder: log, checkpoints and results.

    Raises:
        QueueError: there is no such job, it has not ended, or a job that waits comes after it.
    """
    with history.transaction():
        row = history.get(id)
        if not row.state.final or home.folder(id).is_watched:
            raise QueueError(f"job {id} has not ended: it is {row.state}. Cancel it first")
        if waits := [other.id for other in history.unfinished() if id in other.after]:
            raise QueueError(f"job {waits[0]} comes after job {id}. Cancel that first")
        shutil.rmtree(home.folder(id).path)
        history.remove(id)


def refresh(home: Home, history: History, backends: Mapping[str, Backend]) -> None:
    """Note the ends of jobs that the queue of the home does not watch.

    Args:
        home: of the jobs.
        history: of the home.
        backends: by name; those that the queue serves are left out.
    """
    for name, backend in backends.items():
        rows = history.unfinished(name)
        if backend.queued or not rows:
            continue
        lost = backend.lost([row for row in rows if not row.state.final])
        for row in rows:
            folder = home.folder(row.id)
            if row.id in lost and not folder.is_watched and not folder.status().state.final:
                _note_lost(row, folder)
            if folder.status().state.final:
                note_end(history, row.id)


def _note_lost(row: Row, folder: JobFolder) -> None:
    status = folder.status()
    status.state, status.ended = State.FAILED, time.time()
    status.message = (
        f"schedule: {row.backend} does not know {row.handle} any more. `egeria jobs resume {row.id}` continues it"
    )
    folder.write_status(status)
    folder.tell("schedule", status.message)


def _handles(history: History, backend: Backend, waits: Sequence[int]) -> list[str]:
    """Return the names that the back end gave to the jobs that must be done first and are not."""
    rows = [history.get(id) for id in waits]
    for row in rows:
        if row.backend != backend.name:
            raise QueueError(f"a job on {backend.name} cannot wait for job {row.id} on {row.backend}. Submit it later")
        if row.state in (State.FAILED, State.CANCELLED):
            raise QueueError(f"job {row.id}, which must be done first, is {row.state}. Resume it, or leave it out")
    return [row.handle for row in rows if row.state is not State.DONE]


def _hand_over(history: History, backend: Backend, jobs: Sequence[tuple[Row, JobFolder]]) -> None:
    try:
        handles = backend.start(jobs)
    except QueueError as error:
        for row, folder in jobs:
            status = folder.status()
            status.state, status.message, status.ended = State.FAILED, f"schedule: {error}", time.time()
            folder.write_status(status)
            note_end(history, row.id)
        raise
    with history.transaction():
        for id, handle in handles.items():
            history.update(id, handle=handle)
