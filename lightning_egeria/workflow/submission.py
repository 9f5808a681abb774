"""Handing jobs over, ending them, letting them go on."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_egeria.errors import QueueError
from lightning_egeria.programs import files
from lightning_egeria.workflow.compiler import Compiled
from lightning_egeria.workflow.history import History, Row
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.jobfolders import JobFolder, State, Submission
from lightning_egeria.workflow.refreshing import keep_state


class Backend(Protocol):
    """Where jobs run."""

    name: str
    waits: bool  # whether a job there can wait for others

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
            share = one.job["queue"]["share"] or getpass.getuser()
            id = history.add({**one.job, "name": one.name}, one.path, backend.name, share, waits)
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
        if row.state is not State.RUNNING:
            status = folder.status()
            status.state, status.ended = State.CANCELLED, time.time()
            folder.write_status(status)
            history.update(id, state=State.CANCELLED.value, ended=status.ended)
    folder.ask(State.CANCELLED)
    backend.cancel(row)
    return f"job {id} is cancelled" if row.state is not State.RUNNING else f"job {id} is asked to end"


def resume(home: Home, history: History, backend: Backend, id: int) -> None:
    """Let a job that has failed or was cancelled go on from its last checkpoint.

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
        history.update(id, state=State.QUEUED.value, started=None, ended=None, message="", handle="")
    _hand_over(history, backend, [(history.get(id), folder)])


def refresh(home: Home, history: History, backends: Mapping[str, Backend]) -> None:
    """Bring the history up to date for the jobs that the local queue does not watch."""
    for name, backend in backends.items():
        rows = history.unfinished(name)
        if name == "local" or not rows:
            continue
        for row in rows:
            keep_state(history, row, home.folder(row.id))
        rows = history.unfinished(name)
        lost = backend.lost(rows) if rows else set()
        for row in rows:
            folder = home.folder(row.id)
            if row.id in lost and not folder.is_watched and not folder.status().state.final:
                _note_lost(history, row, folder)


def _note_lost(history: History, row: Row, folder: JobFolder) -> None:
    status = folder.status()
    status.state, status.ended = State.FAILED, time.time()
    status.message = (
        f"schedule: {row.backend} does not know {row.handle} any more. `egeria-jobs resume {row.id}` goes on"
    )
    folder.write_status(status)
    folder.tell("schedule", status.message)
    keep_state(history, row, folder)


def _handles(history: History, backend: Backend, waits: Sequence[int]) -> list[str]:
    """Return the names that the back end gave to the jobs that must be done first and are not."""
    rows = [history.get(id) for id in waits]
    for row in rows:
        if not backend.waits or row.backend != backend.name:
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
            keep_state(history, row, folder)
        raise
    with history.transaction():
        for id, handle in handles.items():
            history.update(id, handle=handle)
