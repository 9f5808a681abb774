import json
import os
import signal
import subprocess
import sys

import pytest

from lightning_egeria.errors import JobError
from lightning_egeria.jobs import execution
from lightning_egeria.jobs.execution import ALREADY, Execution, main
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.machine import start_execution
from support.jobs.described import PYTHON, alive, described, folder_of, until


def run(tmp_path, command, **keys):
    """Run a job to its end in this process; return its folder and exit status."""
    folder = folder_of(tmp_path, described(tmp_path, **{"entry.command": json.dumps(command), **keys}))
    return folder, Execution(folder.path).run()


def test_a_job_that_ends_well(tmp_path):
    folder, status = run(
        tmp_path,
        "echo hello from $EGERIA_JOB_NAME; printenv A; echo and errors >&2",
        **{"environment.variables": '{A: "two\\nlines; $(false)"}'},
    )
    log = folder.log.read_text()
    assert status == 0
    assert "hello from hello\ntwo\nlines; $(false)\nand errors\n" in log
    assert "[execute] attempt 1: done" in log
    assert (folder.status().state, folder.status().attempt) == (State.DONE, 1)
    assert folder.since_beat() is not None
    assert Execution(folder.path).run() == 0  # nothing runs twice
    assert folder.log.read_text() == log


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exit 3", "execute: ended with status 3; its log says why"),
        ("kill -TERM $$", "execute: ended by SIGTERM"),
        (
            ["no-such-program", "; touch x"],
            "execute: the command 'no-such-program' cannot be started: No such file or directory",
        ),
    ],
)
def test_a_job_that_fails_says_why(command, message, tmp_path):
    folder, status = run(tmp_path, command)
    assert (status, folder.status().state, folder.status().message) == (1, State.FAILED, message)
    assert message in folder.log.read_text()


def test_it_is_tried_again_as_often_as_it_says(tmp_path):
    folder, status = run(tmp_path, "test $EGERIA_ATTEMPT = 3", retries=2)
    assert (status, folder.status().attempt, folder.status().failures) == (0, 3, 2)
    folder, status = run(tmp_path / "other", "false", retries=1)
    assert (status, folder.status().attempt) == (1, 2)


def test_a_killed_job_goes_on_while_it_makes_progress(tmp_path):
    script = 'n=$EGERIA_ATTEMPT; echo x > "$EGERIA_CHECKPOINTS/$n"; test $n = 6 || kill -KILL $$'
    folder, status = run(tmp_path, script)
    assert (status, folder.status().attempt) == (0, 6)
    folder, status = run(tmp_path / "other", "kill -KILL $$")
    assert (status, folder.status().attempt) == (1, 3)
    assert folder.status().message == "execute: stopped 3 times in a row without a new checkpoint"


def test_secrets_are_not_in_the_log_and_not_in_any_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "hidden-value")
    folder, _ = run(
        tmp_path, "printf hidden-; sleep 0.1; echo value; printenv TOKEN", **{"environment.secrets": "[TOKEN]"}
    )
    assert folder.log.read_text().count("[TOKEN]") == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"hidden-value" in path.read_bytes()] == []
    monkeypatch.delenv("TOKEN")
    folder.revive()
    assert Execution(folder.path).run() == 1
    assert "TOKEN: not set in the environment of the process that runs the job" in folder.status().message


def test_a_full_disk_does_not_end_the_job(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, described(tmp_path, **{"entry.command": "echo x; echo y"}))
    output = execution._Output
    opened = []

    def full(process, log, redactor):
        with monkeypatch.context() as patch:
            patch.setattr(execution.files, "adding", lambda path: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", 0))
            opened.append(output(process, log, redactor))
        return opened[0]

    monkeypatch.setattr(execution, "_Output", full)
    assert Execution(folder.path).run() == 0
    assert opened[0].full


def test_hooks_are_called(tmp_path):
    hook = json.dumps([PYTHON, "-c", "import os; open('told', 'a').write(os.environ['EGERIA_JOB_STATE'])"])
    folder, _ = run(tmp_path, "true", **{"notifications.done": hook, "notifications.failed": "[no-such-program]"})
    assert (folder.work / "told").read_text() == "done"
    folder, _ = run(tmp_path / "other", "false", **{"notifications.failed": "[no-such-program]"})
    assert "the notification failed" in folder.log.read_text()


@pytest.mark.parametrize("where", ["command", "notification", "failed notification", "arguments"])
@pytest.mark.parametrize("name", ["TOK", "UNDECLARED_API_KEY"])
def test_no_secret_reaches_the_log(where, name, tmp_path, monkeypatch):
    """Neither of a job, nor of a hook; declared, or named like a secret."""
    monkeypatch.setenv(name, "s3cr3tvalue")
    say = f"echo said ${name} and more; echo ${name} >&2"
    keys = {"environment.secrets": "[TOK]"} if name == "TOK" else {}
    if "notification" in where:
        end = "; exit 1" if "failed" in where else ""
        keys["notifications.done"] = json.dumps(["sh", "-c", say + end])
        say = "true"
    elif where == "arguments":
        say = ["printenv", name]
    folder, _ = run(tmp_path, say, **keys)
    log = folder.log.read_text()
    assert "s3cr3tvalue" not in log
    assert f"[{name}]" in log
    assert ("notification] said" in log) == ("notification" in where)
    assert "s3cr3tvalue" not in (folder.path / "status.json").read_text()


def test_nothing_is_imported_from_where_the_command_is_typed(tmp_path, monkeypatch):
    """The working folder is a stranger's checkout: its modules have the names of ours."""
    folder = folder_of(tmp_path / "mine", described(tmp_path / "mine", **{"entry.command": "[echo]"}))
    for name in ("json.py", "yaml.py", "lightning_egeria.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    process = start_execution(folder, "", {})
    assert process.wait(60) == 0
    assert not (tmp_path / "ran").exists()


def test_a_time_limit_stops_it(tmp_path):
    folder, status = run(tmp_path, "exec sleep 60", **{"resources.time": "1s", "checkpoints.grace": "1s"})
    assert (status, folder.status().state) == (75, State.PREEMPTED)
    assert "the time limit of 1s is near" in folder.log.read_text()


def test_a_changed_run_directory_does_not_run(tmp_path):
    folder = folder_of(tmp_path, described(tmp_path))
    path = tmp_path / "home" / "runs"
    (job,) = path.glob("*/job.json")
    job.chmod(0o600)
    job.write_text(job.read_text().replace("echo hello", "echo other"))
    assert Execution(folder.path).run() == 1
    assert "job.json has changed since it was compiled" in folder.status().message
    assert "other" not in folder.log.read_text().replace("others", "")


def started(folder, *token):
    command = [sys.executable, "-m", "lightning_egeria.jobs.execution", str(folder.path), *token]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_kills_and_signals(tmp_path):
    script = (
        "trap 'echo saving; touch \"$EGERIA_CHECKPOINTS/x\"; exit 9' TERM; echo $$ > pid; while :; do sleep 0.05; done"
    )
    folder = folder_of(
        tmp_path, described(tmp_path, **{"entry.command": json.dumps(script), "checkpoints.grace": "5s"})
    )
    folder.give_token("new")
    pid = folder.work / "pid"
    with started(folder, "old") as late:
        assert late.wait() == ALREADY  # the queue has given the job to another process
    assert folder.status().attempt == 0
    with started(folder, "new") as first:
        until(lambda: pid.exists() and pid.read_text().strip())
        with started(folder, "new") as second:
            assert second.wait() == ALREADY  # one process has the job
        assert folder.is_watched
        first.send_signal(signal.SIGKILL)
    child = int(pid.read_text())
    until(lambda: not alive(child))  # it ends with the process that watched it
    assert not folder.is_watched
    pid.unlink()
    with started(folder, "new") as watching:
        until(lambda: pid.exists() and pid.read_text().strip())
        watching.send_signal(signal.SIGUSR2)
        assert watching.wait() == 75
    assert (folder.status().state, folder.status().attempt) == (State.PREEMPTED, 2)
    assert "saving" in folder.log.read_text()
    pid.unlink()
    with started(folder, "new") as watching:
        until(lambda: pid.exists() and pid.read_text().strip())
        folder.ask(State.CANCELLED)
        assert watching.wait() == 2
    assert folder.status().state is State.CANCELLED


@pytest.mark.parametrize(("way", "state"), [(State.PREEMPTED, State.PREEMPTED), (State.CANCELLED, State.CANCELLED)])
def test_status_0_after_a_signal_is_no_end(way, state, tmp_path):
    """Lightning ends with it after SIGTERM, in the middle of training."""
    script = "trap 'exit 0' TERM; touch up; while :; do sleep 0.05; done"
    folder = folder_of(tmp_path, described(tmp_path, **{"entry.command": json.dumps(script)}))
    with started(folder) as watching:
        until((folder.work / "up").exists)
        folder.ask(way)
        watching.wait()
    assert folder.status().state is state


def test_main_names_the_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["execution", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    assert main() == 1
    assert "execute: " in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(JobError, match="no folder of a job"):
        Execution(tmp_path).run()
    assert os.listdir(tmp_path) == []  # noqa: PTH208
