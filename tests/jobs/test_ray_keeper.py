"""With a program in place of Ray's, which these tests do without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from described import alive, until

from lightning_egeria.core.programs.processes import kill_marked

PROGRAM = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(next(option for option in sys.argv if option.startswith("--temp-dir=")).partition("=")[2])
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
(folder / "session").mkdir()
pathlib.Path(sys.argv[-1]).write_text(f"{folder} {left.pid} {' '.join(sys.argv[1:4])}")
print("started", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def kept(tmp_path):
    """A keeper, the folder that it made, and the processes that its program started."""
    (tmp_path / "ray" / "scripts").mkdir(parents=True)
    for package in ("ray", "ray/scripts"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "ray/scripts/scripts.py").write_text(PROGRAM)
    said, log = tmp_path / "said", tmp_path / "log"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "lightning_egeria.jobs.ray_keeper", str(folder), str(log), str(said)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE) as keeper:
        until(lambda: said.exists() and said.read_text().endswith("--block"))
        named, left, _ = said.read_text().split(maxsplit=2)
        assert named == str(folder)
        yield keeper, folder, int(left)
        keeper.kill()
        kill_marked(folder)
    assert log.read_text() == "started\n"


@pytest.mark.parametrize("way", ["closed", "terminated"])
def test_nothing_is_left(way, kept):
    keeper, folder, left = kept
    if way == "closed":
        keeper.stdin.close()
    else:
        keeper.terminate()
    assert keeper.wait(20) == {"closed": 15, "terminated": 143}[way]
    assert not folder.exists()
    until(lambda: not alive(left))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a program with its parent")
def test_a_killed_keeper_takes_ray_with_it(kept):
    keeper, _, _ = kept
    ray = int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0])
    keeper.kill()
    keeper.wait(20)
    until(lambda: not alive(ray))
