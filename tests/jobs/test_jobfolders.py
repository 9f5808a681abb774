import json
import os

import pytest

from lightning_egeria.errors import ExecutionError, QueueError
from lightning_egeria.jobs import jobfolders
from lightning_egeria.jobs.jobfolders import JobFolder, State, Status, Submission

SUBMISSION = Submission(7, "a", "/runs/x", "/here", "local")


@pytest.fixture
def folder(tmp_path):
    return JobFolder.create(tmp_path / "7", SUBMISSION)


def test_what_was_submitted_and_its_state_come_back(folder):
    assert folder.submission() == SUBMISSION
    assert folder.status() == Status()
    folder.write_status(Status(State.FAILED, 2, message="x\ny"))
    assert JobFolder(folder.path).status() == Status(State.FAILED, 2, message="x\ny")
    assert [state for state in State if state.final] == [State.DONE, State.FAILED, State.CANCELLED]


def test_a_damaged_status_is_a_lost_job(folder):
    texts = ["", "{", '{"state": "odd"}', "[]", "[" * 100_000, '{"state": "done", "attempt": 1' + "0" * 5000 + "}"]
    odd = {"attempt": ["x", -1, None, True, 10**400], "progress": [2**63, "1"], "started": ["1", 1e400, 10**18]}
    odd |= {"message": [3, "\ud800", None], "host": [[]], "state": [[], None, "odd"], "other": [1]}
    texts += [json.dumps({"state": "done", name: value}) for name, values in odd.items() for value in values]
    for text in texts:
        (folder.path / "status.json").write_text(text)
        assert folder.status() == Status(State.LOST, message="the status file is damaged"), text


@pytest.mark.parametrize("name", ["status.json", "asked", "token", "submission.json", "log", "heartbeat", "lock"])
def test_no_file_of_a_job_is_followed_elsewhere(name, folder, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(target)
    calls = [folder.status, lambda: folder.asked, folder.token, folder.submission, folder.beat]
    calls += [lambda: folder.tell("execute", "x"), lambda: folder.is_watched]
    for call in calls:
        try:
            call()
        except (OSError, ExecutionError):
            continue
    folder.write_status(Status())
    folder.ask(State.CANCELLED)
    folder.give_token("t")
    assert target.read_text() == "mine"


def test_an_empty_wish_is_none(folder):
    for text in ("", "odd", "\0", "\udcff"):
        (folder.path / "asked").write_bytes(text.encode(errors="surrogateescape"))
        assert folder.asked is None


def test_no_folder_of_a_job(tmp_path, folder):
    with pytest.raises(ExecutionError, match="no folder of a job"):
        JobFolder(tmp_path).submission()
    for text in ("[" * 100_000, '{"id": 1}', '{"id": 1' + "0" * 400 + "}", "[]", "3"):
        (folder.path / "submission.json").write_text(text)
        with pytest.raises(ExecutionError, match="no folder of a job"):
            folder.submission()
    with pytest.raises(QueueError, match="cannot write the folder"):
        JobFolder.create(folder.path, SUBMISSION)


def test_asking_reviving_and_telling(folder):
    assert folder.asked is None
    folder.ask(State.CANCELLED)
    assert folder.asked is State.CANCELLED
    folder.write_status(Status(State.FAILED, 3, failures=2))
    folder.revive()
    assert (folder.asked, folder.status()) == (None, Status(attempt=3))
    folder.tell("schedule", "one\ntwo")
    assert [line.partition("[")[2] for line in folder.log.read_text().splitlines()] == [
        "schedule] one",
        "schedule] two",
    ]


@pytest.mark.parametrize(
    ("state", "stopping", "expected"),
    [
        (State.DONE, False, State.DONE),
        (State.CANCELLED, True, State.CANCELLED),
        (State.FAILED, False, State.QUEUED),
        (State.FAILED, True, State.FAILED),
        (State.PREEMPTED, True, State.PREEMPTED),
        (State.LOST, False, State.QUEUED),
        (State.LOST, True, State.PREEMPTED),
    ],
)
def test_how_an_attempt_ends(state, stopping, expected, folder):
    status = Status(state)
    folder.settle(status, retries=1, stopping=stopping)
    assert (status.state, folder.status().state) == (expected, expected)
    status = Status(state, failures=1, stalls=2)
    folder.settle(status, retries=1, stopping=stopping)
    assert status.state is (State.FAILED if state in (State.FAILED, State.PREEMPTED, State.LOST) else expected)


def test_one_process_watches(folder):
    with folder.watched() as free:
        assert free
        assert folder.is_watched
    assert not folder.is_watched


def test_a_full_disk_keeps_the_old_file(folder, monkeypatch):
    folder.write_status(Status(attempt=1))

    def full(file, mode):
        os.close(file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jobfolders.files.os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write_status(Status(attempt=2))
    monkeypatch.undo()
    assert folder.status().attempt == 1
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".")] == []
