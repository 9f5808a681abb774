"""Processes of jobs, and what is left of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_egeria.cluster.processes import JobProcess
from lightning_egeria.errors import JobError

SLEEPS = "import subprocess, time; print('child', subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def start(code, log, **environment):
    return JobProcess([sys.executable, "-c", code], log, {**os.environ, **environment})


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_and_status_are_kept(tmp_path):
    log = tmp_path / "log.txt"
    process = start("import os; print(os.environ['A']); raise SystemExit(7)", log, A="b; c $HOME")
    assert process.wait(60) == 7
    assert start("print('again')", log).wait(60) == 0
    assert log.read_text() == "b; c $HOME\nagain\n"


def test_a_running_process_has_no_status(tmp_path):
    process = start("import time; time.sleep(60)", tmp_path / "log.txt")
    assert process.wait(0.01) is None
    assert process.stop(60) == -signal.SIGTERM


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_children_end_with_their_process(tmp_path):
    log = tmp_path / "log.txt"
    process = start(SLEEPS, log)
    wait_for(lambda: "child" in log.read_text())
    child = int(log.read_text().split()[1])
    assert exists(child)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    wait_for(lambda: not exists(child))


def test_a_stubborn_process_is_killed(tmp_path):
    log = tmp_path / "log.txt"
    process = start(STUBBORN, log)
    wait_for(lambda: "up" in log.read_text())
    assert process.stop(0.1) == -signal.SIGKILL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere it may stay")
def test_it_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from lightning_egeria.cluster.processes import JobProcess\n"
        "one = JobProcess(['sleep', '60'], Path(sys.argv[1]), {}); print(one.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "log"], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert exists(child)
        parent.kill()
    wait_for(lambda: not exists(child))


@pytest.mark.parametrize("program", ["/no/such/program", "nul\0"])
def test_what_cannot_start_is_named(program, tmp_path):
    with pytest.raises(JobError, match="cannot be started"):
        JobProcess([program], tmp_path / "log.txt", {})
