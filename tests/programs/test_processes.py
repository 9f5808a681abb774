"""Processes of jobs, and what is left of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_egeria.core.programs.processes import MARK, ProgramProcess, kill_marked
from lightning_egeria.errors import ProgramError

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def start(arguments, folder, **environment):
    return ProgramProcess(arguments, folder, {**os.environ, **environment}, log=folder / "log")


def shell(line, folder):
    return start(["/bin/sh", "-c", line], folder)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def number_in(path):
    """The number that a process writes to a file."""
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def test_output_and_status_are_kept(tmp_path):
    process = start(["/bin/sh", "-c", 'echo "$A" $PWD; exit 7'], tmp_path, A="b; c $HOME")
    assert process.wait(60) == 7
    assert (process.poll(), process.stop(0)) == (7, 7)
    assert shell("echo again >&2", tmp_path).wait(60) == 0
    assert (tmp_path / "log").read_text() == f"b; c $HOME {Path.cwd()}\nagain\n"


def test_without_a_log_the_output_can_be_read(tmp_path):
    process = ProgramProcess(["/bin/sh", "-c", "pwd; sleep 60"], tmp_path, dict(os.environ), work=tmp_path)
    assert process.wait(0.01) is None

    def read():
        try:
            return os.read(process.output, 1000) == f"{tmp_path}\n".encode()
        except BlockingIOError:
            return False

    wait_for(read)
    assert process.stop(60) == -signal.SIGTERM


@LINUX
@pytest.mark.parametrize("way", ["group", "session"])
def test_what_it_has_started_ends_with_it(way, tmp_path):
    line = {"group": "sleep 60 & echo $! > child", "session": "setsid sh -c 'echo $$ > child; exec sleep 60' &"}[way]
    process = shell(
        f"cd {tmp_path}; {line}\n{'wait' if way == 'group' else 'until test -s child; do :; done'}", tmp_path
    )
    child = number_in(tmp_path / "child")
    if way == "group":
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    else:
        assert process.wait(60) == 0
    wait_for(lambda: not exists(child))


def test_a_stubborn_program_is_killed(tmp_path):
    process = shell(f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done", tmp_path)
    wait_for((tmp_path / "up").exists)
    assert process.stop(0.1) == -signal.SIGKILL


def test_only_the_program_is_asked_to_end(tmp_path):
    """A loading worker that died of the signal would disturb the last checkpoint."""
    worker = f"trap 'touch {tmp_path}/asked' TERM; while :; do sleep 0.05; done"
    line = f'(sh -c "{worker}") & trap "echo saved; exit 3" TERM; touch {tmp_path}/up; while :; do sleep 0.05; done'
    process = shell(line, tmp_path)
    wait_for((tmp_path / "up").exists)
    assert process.stop(60) == 3
    assert (tmp_path / "log").read_text() == "saved\n"
    assert not (tmp_path / "asked").exists()


def test_a_shell_leaves_the_signal_to_its_program(tmp_path):
    program = tmp_path / "program"
    program.write_text("trap 'sleep 0.2; echo saved; exit 3' TERM\ntouch $1; while :; do sleep 0.05; done")
    process = shell(f"true && sh {program} {tmp_path}/up; true", tmp_path)
    wait_for((tmp_path / "up").exists)
    assert process.stop(60) == -signal.SIGTERM
    assert (tmp_path / "log").read_text().endswith("saved\n")


@LINUX
def test_it_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lightning_egeria.core.programs.processes import ProgramProcess\n"
        "one = ProgramProcess(['sleep', '60'], Path(sys.argv[1]), {}); print(one.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert exists(child)
        parent.kill()
    wait_for(lambda: not exists(child))


@LINUX
def test_what_an_earlier_attempt_left_is_found_by_its_folder(tmp_path):
    own = subprocess.Popen(SLEEP, env={**os.environ, MARK: str(tmp_path)})
    other = subprocess.Popen(SLEEP, env={**os.environ, MARK: str(tmp_path) + "x"})
    try:
        wait_for(lambda: kill_marked(tmp_path) or own.poll() is not None)
        assert own.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert kill_marked(tmp_path) == 0


def test_a_signal_of_slurm_to_all_processes_is_for_the_watcher(tmp_path):
    assert shell("kill -USR2 $$; kill -USR2 0; exit 7", tmp_path).wait(60) == 7


@pytest.mark.parametrize("program", ["/no/such/program", "nul\0"])
def test_what_cannot_start_is_named(program, tmp_path):
    with pytest.raises(ProgramError, match="cannot be started"):
        start([program], tmp_path)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_no_output_goes_through_a_link(kind, tmp_path):
    """A folder of jobs that another user has prepared leads the log to a file of ours."""
    (tmp_path / "mine").write_text("mine")
    log = tmp_path / "log.txt"
    if kind == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(tmp_path / ("mine" if kind == "link" else "made"))
    with pytest.raises(OSError, match=r"log\.txt"):
        ProgramProcess(["echo", "owned"], tmp_path, {}, log=log)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "made").exists()
