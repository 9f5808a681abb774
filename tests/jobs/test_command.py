import contextlib
import json
import os
import re
import sqlite3
import sys
from pathlib import Path

import pytest

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.command import main
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs import command
from lightning_egeria.jobs.history import History
from lightning_egeria.jobs.queue import queue_runs
from support.jobs.described import all_reaped, until


@pytest.fixture
def jobs(tmp_path, monkeypatch, capsys):
    """Run `egeria jobs` in this process; return its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    (tmp_path / "job.yaml").write_text("name: hello\nentry: {command: 'echo hello; sleep 0.2'}\n")

    def run(*arguments):
        status = main(["jobs", "--home", str(tmp_path / "home"), *map(str, arguments)])
        return status, *capsys.readouterr()

    yield run
    if (tmp_path / "home").exists():
        until(lambda: not queue_runs(command.Home(tmp_path / "home")))
        # The queue was started by this process, but is nobody's child to wait for. Other children, such as the server
        # of multiprocessing, go on.
        until(all_reaped)


def test_from_a_description_to_its_log(jobs, tmp_path):
    status, printed, _ = jobs("submit", "--dry-run", "job.yaml")
    assert status == 0
    assert printed.startswith(f"hello: {tmp_path}/home/runs/")
    assert f"{', '.join(CONFIGURABLE)}: off: a command takes no methods" in " ".join(printed.split())
    assert jobs("submit", "job.yaml", "job.yaml")[:2] == (0, "1  hello\n2  hello\n")
    status, printed, _ = jobs("logs", "-f", 2)
    assert "\nhello\n" in printed
    assert "attempt 1: done" in printed
    until(lambda: jobs("ps")[1].count(" done ") == 2)
    rows = [json.loads(line) for line in jobs("ps", "--json")[1].splitlines()]
    assert [(row["id"], row["state"]) for row in rows] == [(2, "done"), (1, "done")]
    assert jobs("resume", 1)[0] == 2
    assert len(list((tmp_path / "home" / "runs").iterdir())) == 1


@pytest.mark.parametrize("behind", [False, True])
def test_the_home_stands_in_front_of_the_command_or_behind_it(behind, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EGERIA_JOBS", str(tmp_path / "another"))
    home = ["--home", str(tmp_path / "home")]
    assert main(["jobs", *([] if behind else home), "ps", *(home if behind else [])]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert main(["jobs", "--home", str(tmp_path / "front"), "ps", "--home", str(tmp_path / "behind")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["behind", "home"]
    assert main(["jobs", "ps"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "behind", "home"]
    capsys.readouterr()


def test_answers_for_programs(jobs, tmp_path):
    (tmp_path / "sweep.yaml").write_text("name: swept\nentry: {command: 'exit $X'}\nsweep: {X: ['0', '1']}\n")

    def found(*arguments):
        status, printed, _ = jobs(*arguments, "--json")
        return status, [json.loads(line) for line in printed.splitlines()]

    status, dry = found("submit", "--dry-run", "sweep.yaml")
    assert (status, [one["name"] for one in dry]) == (0, ["swept.0", "swept.1"])
    assert dry[0]["methods"][0]["method"] == "freezing"
    assert dry[0]["methods"][0].keys() == {"method", "on", "reason", "options"}
    status, handed = found("submit", "sweep.yaml")
    assert (status, handed) == (0, [{"id": id, **one} for id, one in enumerate(dry, start=1)])
    assert found("wait", 1, 2) == (1, [{"id": 1, "state": "done"}, {"id": 2, "state": "failed"}])
    assert found("evict") == (0, [])
    for run in (tmp_path / "home" / "runs").iterdir():
        os.utime(run, (0, 0))
    jobs("rm", 1, 2)
    names = sorted(Path(one["run"]).name for one in dry)
    assert found("evict") == (0, [{"kind": "run directories", "removed": name} for name in names])


def test_auto_can_be_tried_on_handwritten_digits(jobs, tmp_path):
    (tmp_path / "digits.yaml").write_text("name: digits\nentry: {experiment: digits_resnet8}\noptimisations: auto\n")
    status, printed, _ = jobs("submit", "--dry-run", "digits.yaml")
    assert status == 0
    assert "  freezing: on: from scratch, the learning rate falls in steps: 0.89 (0.82" in printed
    assert max(map(len, printed.splitlines()[1:])) <= 80
    assert "  goodput, partial, tuning: off: from scratch, the learning rate falls in steps:\n" in printed


@pytest.mark.slow
def test_a_job_on_handwritten_digits_tells_its_methods_in_its_record(jobs, tmp_path):
    overrides = "[trainer=cpu, trainer.max_epochs=12, data.val_fraction=0.95]"
    text = f"name: digits\nentry: {{experiment: digits_resnet8, overrides: {overrides}}}\n"
    (tmp_path / "digits.yaml").write_text(text)
    assert jobs("submit", "digits.yaml")[:2] == (0, "1  digits  with freezing\n")
    assert jobs("wait", 1)[0] == 0
    record = json.loads((tmp_path / "home" / "jobs" / "1" / "results" / "egeria.json").read_text())
    assert record["about"]["methods"].startswith("freezing: on: from scratch, the learning rate falls in steps: 0.89")


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
        f"resources.time={'9' * 20}d",
        f"resources.memory={'9' * 20}TB",
        f"retries={2**31}",
    ],
)
def test_a_number_of_a_description_has_bounds(jobs, key):
    status, _, errors = jobs("submit", "--dry-run", "job.yaml", "--set", key)
    assert status == 2
    assert errors.count("\n") == 1
    assert key.partition("=")[0] in errors


@pytest.mark.parametrize(
    "arguments", [("logs", "hello"), ("cancel", "1", "hello"), ("submit", "x", "--after", "hello")]
)
def test_a_job_goes_by_its_number(jobs, arguments, capsys):
    with pytest.raises(SystemExit):
        jobs(*arguments)
    assert "expected the number of a job, as `egeria jobs ps` lists them, got 'hello'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("logs", "1", "--tail", 2**63), ("ps", "-n", 2**63)])
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
    assert jobs("resume", 1)[1] == "job 1 is queued again\n"
    until(lambda: " done " in jobs("ps")[1])


def test_mistakes_are_one_message_with_their_layer(jobs, tmp_path):
    assert jobs("submit", "--dry-run", "job.yaml", "--set", "nam=x")[::2] == (
        2,
        "egeria jobs: schema: nam=x: nam: no such key. Did you mean 'name'?\n",
    )
    assert jobs("logs", 5)[2] == "egeria jobs: schedule: there is no job 5. `egeria jobs ps` lists them\n"
    assert jobs("submit", "--dry-run", "job.yaml", "--set", "environment.lock=x")[2].startswith(
        "egeria jobs: compile: environment.lock=x"
    )
    assert (
        "needs 3 devices, and the largest machine here has 2"
        in jobs("submit", "job.yaml", "--set", "resources.devices=3")[2]
    )
    assert jobs("digest", "none")[2] == "egeria jobs: none: No such file or directory\n"


def test_a_back_end_that_does_not_answer_hides_no_job(jobs, tmp_path, monkeypatch):
    jobs("ps")
    job = {"name": "far", "queue": {"priority": 0}, "resources": {"devices": 1, "most_devices": None}}
    with History(tmp_path / "home" / "history.sqlite", tmp_path / "home" / "jobs") as history, history.transaction():
        history.add(job, tmp_path, "slurm")
        history.add({**job, "name": "near"}, tmp_path, "local")

    def refuse(name, home, address=""):
        raise QueueError("nobody answers")

    monkeypatch.setattr(command, "backend", refuse)
    status, shown, said = jobs("ps")
    assert (status, said) == (0, "egeria jobs: slurm jobs as they were last known: nobody answers\n")
    assert shown.splitlines()[1].startswith("1   far")
    assert shown.splitlines()[-1].startswith("no queue runs")


def test_evict_takes_a_period(jobs):
    jobs("submit", "--dry-run", "job.yaml")
    assert jobs("evict")[1] == "removed 0 environments\nremoved 0 run directories\n"
    assert jobs("evict", "--older-than", "1s")[0] == 0
    with pytest.raises(SystemExit):
        jobs("evict", "--older-than", "soon")


def test_schema_and_digest(jobs, tmp_path):
    assert json.loads(jobs("schema")[1])["title"] == "job of egeria"
    assert jobs("digest", "job.yaml")[1].startswith("sha256:")


@pytest.mark.parametrize(("name", "module"), [("slurm", "submitit"), ("ray", "ray.job_submission")])
def test_an_extra_that_is_missing_is_named(name, module, jobs, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for file in ("slurm", "ray_cluster"):
        monkeypatch.delitem(sys.modules, f"lightning_egeria.jobs.{file}", raising=False)
    assert f"pip install 'lightning-egeria[{name}]'" in jobs("submit", "-b", name, "job.yaml")[2]


def test_ten_thousand_jobs_are_listed_from_the_end(jobs, tmp_path):
    jobs("ps")
    job = {"name": "old", "queue": {"priority": 0}, "resources": {"devices": 1, "most_devices": None}}
    with History(tmp_path / "home" / "history.sqlite", tmp_path / "home" / "jobs") as history, history.transaction():
        for _ in range(10_000):
            history.add(job, tmp_path, "local")
    database = tmp_path / "home" / "history.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as opened, opened:
        opened.execute("UPDATE submitted SET closed = 2")
    lines = jobs("ps")[1].splitlines()
    assert len(lines) == 21
    assert lines[1].startswith("10000  old")


def test_what_is_known_of_a_job(jobs, tmp_path):
    jobs("submit", "job.yaml")
    assert jobs("wait", 1)[:2] == (0, "1  done\n")
    shown = jobs("show", 1)[1]
    for name, value in (("state", "done"), ("entry", "echo hello; sleep 0.2"), ("log", str(tmp_path))):
        assert re.search(rf"^{name} +{re.escape(value)}", shown, re.MULTILINE)
    found = json.loads(jobs("show", 1, "--json")[1])
    assert (found["id"], found["state"], found["attempt"]) == (1, "done", 1)
    assert found["methods"][0].startswith("freezing, cache, ")
    assert jobs("show", 7)[2] == "egeria jobs: schedule: there is no job 7. `egeria jobs ps` lists them\n"


def test_statuses_say_how_jobs_ended(jobs):
    for text in ("exit 0", "echo why; false", "exec sleep 60"):
        assert jobs("submit", "job.yaml", "--set", f"entry.command={text}")[0] == 0
    assert jobs("logs", "-f", 1)[0] == 0
    status, printed, _ = jobs("logs", "-f", 2)
    assert (status, "\nwhy\n" in printed) == (1, True)
    assert jobs("logs", 2)[0] == 0
    assert jobs("wait", 1, 2)[:2] == (1, "1  done\n2  failed\n")
    assert jobs("wait", 3, "--timeout", "1s")[0] == 1
    assert jobs("rm", 3)[2].startswith("egeria jobs: schedule: job 3 has not ended")
    jobs("cancel", 3)
    assert jobs("wait", 3)[:2] == (1, "3  cancelled\n")
    assert jobs("rm", 1, 2)[:2] == (0, "job 1 is removed\njob 2 is removed\n")
    assert [json.loads(line)["id"] for line in jobs("ps", "--json")[1].splitlines()] == [3]


def test_the_end_of_a_log(jobs):
    jobs("submit", "job.yaml", "--set", "entry.command=seq 100")
    jobs("wait", 1)
    whole = jobs("logs", 1)[1].splitlines()
    assert jobs("logs", 1, "--tail", 3)[1].splitlines() == whole[-3:]
    assert jobs("logs", "-f", 1, "--tail", 0)[1] == ""


def test_a_dry_run_hands_nothing_over(jobs, tmp_path):
    status, printed, _ = jobs("submit", "--dry-run", "--policy", "fair", "job.yaml")
    assert (status, printed.startswith("hello: ")) == (0, True)
    assert jobs("ps", "--json")[1] == ""
    assert command.Home(tmp_path / "home").policy == "backfill"
    assert jobs("submit", "--policy", "fair", "job.yaml")[0] == 0
    assert command.Home(tmp_path / "home").policy == "fair"
