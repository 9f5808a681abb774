import contextlib
import json
import sqlite3
import sys

import pytest
from described import all_reaped, until

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow import command
from lightning_egeria.workflow.command import main
from lightning_egeria.workflow.history import History
from lightning_egeria.workflow.local_queue import queue_runs


@pytest.fixture
def jobs(tmp_path, monkeypatch, capsys):
    """Run `egeria-jobs` in this process; return its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    (tmp_path / "job.yaml").write_text("name: hello\nentry: {command: 'echo hello; sleep 0.2'}\n")

    def run(*arguments):
        status = main(["--home", str(tmp_path / "home"), *map(str, arguments)])
        return status, *capsys.readouterr()

    yield run
    if (tmp_path / "home").exists():
        until(lambda: not queue_runs(command.Home(tmp_path / "home")))
        # The queue was started by this process, but is nobody's child to wait for. Other children, such as the server
        # of multiprocessing, go on.
        until(all_reaped)


def test_from_a_description_to_its_log(jobs, tmp_path):
    status, printed, _ = jobs("compile", "job.yaml")
    assert status == 0
    assert printed.startswith(f"hello: {tmp_path}/home/runs/")
    assert "freezing: off: a command takes no methods" in printed
    assert jobs("submit", "job.yaml", "job.yaml")[:2] == (0, "1  hello\n2  hello\n")
    status, printed, _ = jobs("logs", "-f", 2)
    assert "\nhello\n" in printed
    assert "attempt 1: done" in printed
    until(lambda: jobs("ps")[1].count(" done ") == 2)
    rows = [json.loads(line) for line in jobs("ps", "--json")[1].splitlines()]
    assert [(row["id"], row["state"]) for row in rows] == [(2, "done"), (1, "done")]
    assert jobs("resume", 1)[0] == 2
    assert len(list((tmp_path / "home" / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("logs", "9" * 23),
        ("cancel", "9" * 23),
        ("resume", 2**63),
        ("submit", "job.yaml", "--after", "9" * 23),
        ("submit", "job.yaml", "--set", "queue.after=['99999999999999999']"),
    ],
)
def test_no_job_has_so_large_an_id(jobs, arguments):
    status, _, errors = jobs(*arguments)
    assert status == 2
    assert "there is no job" in errors


@pytest.mark.parametrize(
    "key",
    [
        f"queue.priority={10**33}",
        f"queue.priority={-(2**31)}",
        f"queue.after=['{'9' * 23}']",
        f"resources.link_gbit=1e{'9' * 9}",
        f"resources.time={'9' * 20}d",
        f"resources.memory={'9' * 20}TB",
        f"retries={2**31}",
    ],
)
def test_a_number_of_a_description_has_bounds(jobs, key):
    status, _, errors = jobs("compile", "job.yaml", "--set", key)
    assert status == 2
    assert errors.count("\n") == 1
    assert key.partition("=")[0] in errors


@pytest.mark.parametrize("arguments", [("serve", "--port", 99999), ("serve", "--port", 0), ("ps", "-n", 2**63)])
def test_an_option_has_bounds(jobs, arguments, capsys):
    with pytest.raises(SystemExit):
        jobs(*arguments)
    assert "expected a whole number from" in capsys.readouterr().err


def test_cancel_and_resume(jobs, tmp_path):
    wait = "entry.command=test -e ../../go || exec sleep 60"
    assert jobs("submit", "job.yaml", "--set", wait)[0] == 0
    until(lambda: " running " in jobs("ps")[1])
    assert jobs("cancel", 1)[1] == "job 1 is asked to end\n"
    until(lambda: " cancelled " in jobs("ps")[1])
    (tmp_path / "home" / "jobs" / "go").touch()
    assert jobs("resume", 1)[1] == "job 1 goes on\n"
    until(lambda: " done " in jobs("ps")[1])


def test_mistakes_are_one_message_with_their_layer(jobs, tmp_path):
    assert jobs("compile", "job.yaml", "--set", "nam=x")[::2] == (
        2,
        "egeria-jobs: schema: nam=x: nam: no such key. Did you mean 'name'?\n",
    )
    assert jobs("logs", 5)[2] == "egeria-jobs: schedule: there is no job 5. `egeria-jobs ps` lists them\n"
    assert jobs("compile", "job.yaml", "--set", "environment.lock=x")[2].startswith(
        "egeria-jobs: compile: environment.lock=x"
    )
    assert "wants nodes=1 with devices=3 each" in jobs("submit", "job.yaml", "--set", "resources.devices=3")[2]
    assert jobs("digest", "none")[2] == "egeria-jobs: none: No such file or directory\n"


def test_a_back_end_that_does_not_answer_hides_no_job(jobs, tmp_path, monkeypatch):
    jobs("ps")
    job = {"name": "far", "queue": {"priority": 0}, "resources": {"devices": 1}}
    with History(tmp_path / "home" / "history.sqlite") as history, history.transaction():
        history.add(job, tmp_path, "slurm", "me")
        history.add({**job, "name": "near"}, tmp_path, "local", "me")

    def refuse(name, home):
        raise QueueError("nobody answers")

    monkeypatch.setattr(command, "backend", refuse)
    status, shown, said = jobs("ps")
    assert (status, said) == (0, "egeria-jobs: slurm jobs as they were last known: nobody answers\n")
    assert shown.splitlines()[1].startswith("1   far")
    assert shown.splitlines()[-1].startswith("no local queue runs")


def test_evict_takes_a_period(jobs):
    jobs("compile", "job.yaml")
    assert jobs("evict")[1] == "removed 0 environments\nremoved 0 run directories\n"
    assert jobs("evict", "--older-than", "1s")[0] == 0
    with pytest.raises(SystemExit):
        jobs("evict", "--older-than", "soon")


def test_schema_and_digest(jobs, tmp_path):
    assert json.loads(jobs("schema")[1])["title"] == "egeria-jobs"
    assert jobs("digest", "job.yaml")[1].startswith("sha256:")


@pytest.mark.parametrize(("name", "module"), [("slurm", "submitit"), ("ray", "ray.job_submission")])
def test_an_extra_that_is_missing_is_named(name, module, jobs, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for file in ("slurm", "ray_jobs"):
        monkeypatch.delitem(sys.modules, f"lightning_egeria.workflow.{file}", raising=False)
    assert f"pip install 'lightning-egeria[{name}]'" in jobs("submit", "-b", name, "job.yaml")[2]


def test_ten_thousand_jobs_are_listed_from_the_end(jobs, tmp_path):
    jobs("ps")
    job = {"name": "old", "queue": {"priority": 0}, "resources": {"devices": 1}}
    with History(tmp_path / "home" / "history.sqlite") as history, history.transaction():
        for _ in range(10_000):
            history.add(job, tmp_path, "local", "me")
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "history.sqlite")) as database, database:
        database.execute("UPDATE jobs SET state = 'done', started = 1, ended = 2")
    lines = jobs("ps")[1].splitlines()
    assert len(lines) == 21
    assert lines[1].startswith("10000  old")
