import pytest

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.jobfolders import State, Status
from lightning_egeria.jobs.submission import cancel, refresh, remove, resume, submit
from support.jobs.described import Quiet, described, ended, submitted


class Elsewhere(Quiet):
    queued = False

    def __init__(self, home, gone=()):
        super().__init__(home, "slurm")
        self.gone, self.refuses = set(gone), False

    def check(self, compiled):
        pass

    def start(self, jobs):
        if self.refuses:
            raise QueueError("it is closed")
        return {row.id: f"h{row.id}" for row, _ in jobs}

    def lost(self, rows):
        return self.gone & {row.id for row in rows}


def handed(home, history, backend, tmp_path, after=()):
    description = described(tmp_path)
    (id,) = submit(home, history, backend, home.compiler(history).compile(description), description.folder, after)
    return id


def test_a_waiting_job_is_cancelled_and_goes_on(home, history, tmp_path):
    (id,) = submitted(home, described(tmp_path), history)
    with pytest.raises(QueueError, match=f"job {id} has not ended: it is queued"):
        resume(home, history, Quiet(home), id)
    assert cancel(home, history, Quiet(home), id) == f"job {id} is cancelled"
    assert cancel(home, history, Quiet(home), id) == f"job {id} has ended already: cancelled"
    resume(home, history, Quiet(home), id)
    assert history.get(id).state is State.QUEUED
    ended(home, history, id, "done")
    with pytest.raises(QueueError, match="is done"):
        resume(home, history, Quiet(home), id)


def test_jobs_to_wait_for_must_be_there(home, history, tmp_path):
    with pytest.raises(QueueError, match="there is no job 99"):
        submitted(home, described(tmp_path), history, after=[99])
    assert history.unfinished() == []
    (id,) = submitted(home, described(tmp_path), history)
    with pytest.raises(QueueError, match=f"a job on slurm cannot wait for job {id} on local"):
        handed(home, history, Elsewhere(home), tmp_path, [id])
    ended(home, history, id, "failed")
    with pytest.raises(QueueError, match=f"job {id}, which must be done first, is failed"):
        submitted(home, described(tmp_path), history, after=[id])


def test_a_back_end_that_refuses(home, history, tmp_path):
    backend = Elsewhere(home)
    backend.refuses = True
    with pytest.raises(QueueError, match="it is closed"):
        handed(home, history, backend, tmp_path)
    (row,) = history.finished(1)
    assert (row.state, row.status.message) == (State.FAILED, "schedule: it is closed")


def test_what_another_back_end_did_is_noted(home, history, tmp_path):
    done, gone, running = (handed(home, history, Elsewhere(home), tmp_path) for _ in range(3))
    assert history.get(done).handle == f"h{done}"
    home.folder(done).write_status(Status(State.DONE, 1, started=1.0, ended=2.0))
    home.folder(running).write_status(Status(State.RUNNING, 1))
    refresh(home, history, {"slurm": Elsewhere(home, {done, gone})})
    assert [history.get(id).state.value for id in (done, gone, running)] == ["done", "failed", "running"]
    assert history.get(gone).status.message.endswith(f"`egeria jobs resume {gone}` continues it")


def test_two_hundred_jobs_are_one_transaction(home, history, tmp_path):
    values = list(range(200))
    ids = submitted(home, described(tmp_path, sweep=f"{{A: {values}}}"), history)
    assert len(set(ids)) == len(history.unfinished("local")) == 200


def test_a_job_that_has_ended_is_removed(home, history, tmp_path):
    (first,) = submitted(home, described(tmp_path), history)
    (second,) = submitted(home, described(tmp_path), history, after=[first])
    with pytest.raises(QueueError, match=f"job {first} has not ended: it is queued. Cancel it first"):
        remove(home, history, first)
    ended(home, history, first, "done")
    with pytest.raises(QueueError, match=f"job {second} comes after job {first}"):
        remove(home, history, first)
    ended(home, history, second, "cancelled")
    remove(home, history, first)
    assert [path.name for path in home.jobs.iterdir()] == [str(second)]
    with pytest.raises(QueueError, match=f"there is no job {first}"):
        remove(home, history, first)
