import json

import pytest

from lightning_egeria.jobs.endings import cost_in, note_end
from lightning_egeria.jobs.history import History
from lightning_egeria.jobs.jobfolders import JobFolder, State, Status, Submission
from lightning_egeria.jobs.optimisations import Measured

JOB = {
    "name": "a",
    "queue": {"priority": 0},
    "resources": {"devices": 1, "most_devices": None},
    "cost_key": "k",
}


def test_a_done_job_leaves_its_costs(tmp_path):
    folder = JobFolder.create(tmp_path / "1", Submission(1, "a", str(tmp_path), "/", "local"))
    (tmp_path / "job.json").write_text('{"epochs": 3}')
    (folder.results / "savings.json").write_text('{"fit_time_s": 7.5}')
    assert cost_in(folder.results, tmp_path) == Measured(7.5, 3)
    with History(tmp_path / "history", tmp_path) as history:
        id = history.add(JOB, tmp_path, "local")
        folder.write_status(Status(State.DONE, 2, started=1.0, ended=5.0))
        note_end(history, id)
        assert (history.get(id).status.attempt, history.get(id).closed) == (2, 5.0)
        assert history.cost("k").fit_s == 7.5
        (folder.results / "savings.json").write_text("[")
        note_end(history, id)
        assert history.get(id).state is State.DONE


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"fit_time_s": ' + "[" * 100_000,
        '{"fit_time_s": 1' + "0" * 400 + "}",
        '{"fit_time_s": NaN}',
        '{"fit_time_s": [1]}',
        "\xff",
    ],
)
def test_hostile_results_cost_nothing(text, tmp_path):
    """They do not end the queue."""
    folder = JobFolder.create(tmp_path / "1", Submission(1, "a", str(tmp_path), "/", "local"))
    (tmp_path / "job.json").write_text('{"epochs": 3}')
    (folder.results / "savings.json").write_text(text, encoding="latin-1")
    folder.write_status(Status(State.DONE, 2, started=1.0, ended=5.0))
    with History(tmp_path / "history", tmp_path) as history:
        id = history.add(JOB, tmp_path, "local")
        note_end(history, id)
        assert history.get(id).closed == 5.0
        assert history.cost("k") is None


@pytest.mark.parametrize("key", ["message", "host", "attempt", "started", "devices", "service"])
def test_a_hostile_status_does_not_end_the_queue(key, tmp_path):
    folder = JobFolder.create(tmp_path / "1", Submission(1, "a", str(tmp_path), "/", "local"))
    with History(tmp_path / "history", tmp_path) as history:
        id = history.add(JOB, tmp_path, "local")
        for value in ("\ud800", 2**63, 10**400, [], "x" * 100, -1, float("inf"), None):
            (folder.path / "status.json").write_text(json.dumps({"state": "running", key: value}))
            assert history.get(id).state in (State.RUNNING, State.LOST)
            note_end(history, id)
