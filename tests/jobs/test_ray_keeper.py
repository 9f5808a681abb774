"""With a program in place of Ray's, which these tests do without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_egeria.core.programs.processes import kill_marked
from support.jobs.described import alive, until

# It leaves a process in a session of its own, and has a process that watches a job: that one saves when it is asked to.
PROGRAM = """
import pathlib, subprocess, sys, time
said = pathlib.Path(sys.argv[-1])
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
watching = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True)));"
watching += "print('watches', flush=True); signal.pause()"
watcher = subprocess.Popen([sys.executable, "-c", watching, "lightning_egeria.jobs.execution"], stdout=subprocess.PIPE)
watcher.stdout.readline()
said.write_text(f"{left.pid} {' '.join(sys.argv[1:])}")
print(watcher.communicate()[0].decode().strip(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def kept(tmp_path):
    """A keeper, its folder, its log and the process that its program leaves."""
    (tmp_path / "ray" / "scripts").mkdir(parents=True)
    for package in ("ray", "ray/scripts"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "ray/scripts/scripts.py").write_text(PROGRAM)
    folder, log, said = (tmp_path / name for name in ("folder", "log", "said"))
    folder.mkdir()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-P", "-m", "lightning_egeria.jobs.ray_keeper", str(folder), str(log), str(said)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE) as keeper:
        until(lambda: said.exists() and said.read_text().endswith(str(said)))
        left, *arguments = said.read_text().split()
        assert arguments == ["start", "--head", "--block", f"--temp-dir={folder}", str(said)]
        yield keeper, folder, log, int(left)
        keeper.kill()
        kill_marked(folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows the processes of a job")
def test_jobs_save_and_nothing_is_left_when_the_pipe_is_closed(kept):
    keeper, folder, log, left = kept
    keeper.stdin.close()  # as the system does when its starter is killed
    assert keeper.wait(20) == 15
    assert log.read_text() == "saved\n"
    assert not folder.exists()
    until(lambda: not alive(left))


def test_nothing_is_left_when_it_is_asked_to_end(kept):
    keeper, folder, _, left = kept
    keeper.terminate()
    assert keeper.wait(20) == 143
    assert not folder.exists()
    until(lambda: not alive(left))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a program with its parent")
def test_a_killed_keeper_takes_ray_with_it(kept):
    keeper, *_ = kept
    ray = int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0])
    keeper.kill()
    keeper.wait(20)
    until(lambda: not alive(ray))
