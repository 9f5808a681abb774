import os
import subprocess
import sys

import pytest

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.history import History
from lightning_egeria.workflow.jobfolders import State
from lightning_egeria.workflow.optimisations import Measured

JOB = {"name": "a", "queue": {"priority": 3}, "resources": {"devices": 2}, "cost_key": "k"}


@pytest.fixture
def history(tmp_path):
    with History(tmp_path / "history.sqlite") as history:
        yield history


def test_jobs_come_back(history, tmp_path):
    id = history.add(JOB, tmp_path / "run", "local", "me", [1, 2])
    row = history.get(id)
    assert (row.name, row.state, row.priority, row.share, row.devices, row.after) == (
        "a",
        State.QUEUED,
        3,
        "me",
        2,
        (1, 2),
    )
    assert row.content()["state"] == "queued"
    history.update(id, state="done", message="'; DROP TABLE jobs")
    assert history.get(id).message == "'; DROP TABLE jobs"
    assert history.unfinished() == []
    assert [row.id for row in history.finished(5)] == [id]
    with pytest.raises(QueueError, match="there is no job 99"):
        history.get(99)


def test_a_transaction_happens_whole_or_not(history, tmp_path):
    def fail():
        with history.transaction():
            history.add(JOB, tmp_path, "local", "me")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert history.unfinished() == []


def test_usage_counts_device_seconds(history, tmp_path):
    for share, started, ended in (("a", 1000.0, 1010.0), ("a", 2000.0, 2005.0), ("b", 10.0, 20.0)):
        history.update(history.add(JOB, tmp_path, "local", share), started=started, ended=ended)
    assert history.usage(100.0) == {"a": 30.0}


def test_costs(history):
    assert history.cost("k") is None
    history.keep_cost("k", Measured(1.0, 2))
    history.keep_cost("k", Measured(3.0, 4, 0.1, 0.2))
    assert history.cost("k") == Measured(3.0, 4, 0.1, 0.2)


def test_a_file_that_is_no_history(tmp_path):
    (tmp_path / "x").write_text("no database, but long enough to be read as one" * 30)
    with pytest.raises(QueueError, match="cannot use the history"):
        History(tmp_path / "x")


def test_opening_it_again_ends_no_lock(tmp_path):
    """Closing any descriptor of a file ends the locks of its process on it: SQLite's own would be gone."""
    path = tmp_path / "history"
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
    with History(path) as history, history.transaction():
        History(path).close()
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
        History(path)
    assert not (tmp_path / "made").exists()
