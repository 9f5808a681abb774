import json

import pytest

from lightning_egeria.workflow.history import History
from lightning_egeria.workflow.jobfolders import JobFolder, State, Status, Submission
from lightning_egeria.workflow.optimisations import Measured
from lightning_egeria.workflow.refreshing import cost_in, keep_state

STEP = {"batches": 2, "data": 0.1, "forward": 0.2, "backward": 0.3, "communication": 0.4, "rest": 0.0}


def test_a_done_job_leaves_its_costs(tmp_path):
    folder = JobFolder.create(tmp_path / "1", Submission(1, "a", str(tmp_path), "/", "local"))
    (tmp_path / "job.json").write_text('{"epochs": 3}')
    (folder.results / "egeria.json").write_text(json.dumps({"steps": [STEP, {**STEP, "data": 0.3}]}))
    (folder.results / "savings.json").write_text('{"fit_time_s": 7.5}')
    assert cost_in(folder.results, tmp_path) == Measured(7.5, 3, pytest.approx(0.4 / 2.2), pytest.approx(0.8 / 2.2))
    with History(tmp_path / "history") as history:
        job = {"name": "a", "queue": {"priority": 0}, "resources": {"devices": 1}, "cost_key": "k"}
        id = history.add(job, tmp_path, "local", "me")
        folder.write_status(Status(State.RUNNING, 2, started=1.0))
        assert keep_state(history, history.get(id), folder) is State.RUNNING
        assert history.cost("k") is None
        folder.write_status(Status(State.DONE, 2, started=1.0, ended=5.0))
        keep_state(history, history.get(id), folder)
        assert (history.get(id).attempt, history.get(id).ended) == (2, 5.0)
        assert history.cost("k").fit_s == 7.5
        (folder.results / "egeria.json").write_text("[")
        assert keep_state(history, history.get(id), folder) is State.DONE
