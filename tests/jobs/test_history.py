import os
import sqlite3
import subprocess
import sys

import pytest

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.history import History
from lightning_egeria.jobs.jobfolders import JobFolder, State, Status, Submission
from lightning_egeria.jobs.optimisations import Measured

JOB = {
    "name": "a",
    "queue": {"priority": 3},
    "resources": {"devices": 2, "most_devices": 4},
    "cost_key": "k",
}


@pytest.fixture
def history(tmp_path):
    with History(tmp_path / "history.sqlite", tmp_path) as history:
        yield history


def test_jobs_come_back(history, tmp_path):
    id = history.add(JOB, tmp_path / "run", "ray", "http://x", [1, 2])
    row = history.get(id)
    assert (row.name, row.backend, row.address, row.priority) == ("a", "ray", "http://x", 3)
    assert (row.devices, row.most_devices, row.after, row.state) == (2, 4, (1, 2), State.QUEUED)
    assert row.content()["state"] == "queued"
    history.update(id, node="'; DROP TABLE submitted", closed=1.0)
    assert history.get(id).node == "'; DROP TABLE submitted"
    assert history.unfinished() == []
    assert [row.id for row in history.finished(5)] == [id]
    history.remove(id)
    for unknown in (id, 99):
        with pytest.raises(QueueError, match=f"there is no job {unknown}"):
            history.get(unknown)


def test_the_state_is_what_the_folder_of_the_job_says(history, tmp_path):
    id = history.add(JOB, tmp_path / "run", "local")
    folder = JobFolder.create(tmp_path / str(id), Submission(id, "a", "/run", "/", "local"))
    folder.write_status(Status(State.RUNNING, 2, message="x"))
    assert (history.get(id).state, history.get(id).status.attempt) == (State.RUNNING, 2)
    assert history.get(id).content()["message"] == "x"


def test_a_transaction_happens_whole_or_not(history, tmp_path):
    def fail():
        with history.transaction():
            history.add(JOB, tmp_path, "local")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert history.unfinished() == []


def test_costs(history):
    assert history.cost("k") is None
    history.keep_cost("k", Measured(1.0, 2))
    history.keep_cost("k", Measured(3.0, 4))
    assert history.cost("k") == Measured(3.0, 4)


def test_a_file_that_is_no_history(tmp_path):
    (tmp_path / "x").write_text("no database, but long enough to be read as one" * 30)
    with pytest.raises(QueueError, match="cannot use the history"):
        History(tmp_path / "x", tmp_path)


def test_opening_it_again_ends_no_lock(tmp_path):
    """Closing any descriptor of a file ends the locks of its process on it: SQLite's own would be gone."""
    path = tmp_path / "history"
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
    with History(path, tmp_path) as history, history.transaction():
        History(path, tmp_path).close()
        tried = subprocess.run([sys.executable, "-c", other, path], capture_output=True, text=True, check=False)
    assert "database is locked" in tried.stderr


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_one_that_is_no_file_of_this_user_is_refused(kind, tmp_path):
    path = tmp_path / "history"
    if kind == "link":
        path.symlink_to(tmp_path / "made")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(QueueError, match="cannot use the history"):
        History(path, tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_full_disk_is_named_though_the_transaction_has_gone(tmp_path, monkeypatch):
    connected, made = sqlite3.connect, []

    def connect(*args, **kwargs):
        made.append(connected(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", connect)
    history = History(tmp_path / "full.sqlite", tmp_path)

    def fill():
        with history.transaction():
            made[0].execute("ROLLBACK")  # as SQLite does itself then
            raise QueueError("database or disk is full")

    with pytest.raises(QueueError, match="database or disk is full"):
        fill()
    with history.transaction():
        pass
    history.close()
