"""With the Slurm of this machine, if it has one: `sinfo` answers."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from described import described, until

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.jobfolders import State
from lightning_egeria.workflow.submission import cancel, refresh, submit

pytest.importorskip("submitit", reason="submitit is an extra")

from lightning_egeria.workflow import slurm


def answers():
    return bool(shutil.which("sinfo")) and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0


real = [pytest.mark.slow, pytest.mark.skipif(not answers(), reason="no Slurm answers `sinfo` on this machine")]


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def history(home):
    with home.history() as history:
        yield history


def add(home, history, command, after=(), **keys):
    keys = {"entry.command": json.dumps(command), "resources.time": "10m", "checkpoints.grace": "10s", **keys}
    description = described(home.path.parent, **keys)
    compiled = home.compiler(history).compile(description)
    return submit(home, history, slurm.Slurm(), compiled, description.folder, after)[0]


def wait(home, history, *ids, seconds=90):
    deadline = time.monotonic() + seconds
    while any(not history.get(id).state.final for id in ids) and time.monotonic() < deadline:
        time.sleep(0.5)
        refresh(home, history, {"slurm": slurm.Slurm()})
    return [history.get(id).state.value for id in ids]


def test_without_a_limit_or_without_slurm(home, history, monkeypatch):
    with pytest.raises(QueueError, match=r"Slurm needs a limit: set resources\.time"):
        add(home, history, "true", **{"resources.time": "~"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(QueueError, match="there is no sinfo here"):
        slurm.Slurm().start([(None, None)])


@pytest.mark.usefixtures("home")
class TestReal:
    pytestmark = real

    def test_three_jobs_dependencies_and_failures(self, home, history):
        ids = [add(home, history, "echo x >> ../../ran; sleep 1") for _ in range(3)]
        last = add(home, history, "wc -l < ../../ran", after=ids)
        bad = add(home, history, "exit 3")
        assert wait(home, history, *ids, last, bad) == ["done"] * 4 + ["failed"]
        assert "\n3\n" in home.folder(last).log.read_text()
        assert history.get(bad).message == "execute: ended with status 3; its log says why"

    def test_cancel(self, home, history):
        running = add(home, history, "touch up; exec sleep 100")
        until(lambda: (home.folder(running).work / "up").exists(), 60)
        refresh(home, history, {"slurm": slurm.Slurm()})
        cancel(home, history, slurm.Slurm(), running)
        assert wait(home, history, running) == ["cancelled"]

    def test_a_signal_and_a_kill_put_it_into_the_queue_again(self, home, history):
        script = (
            "trap 'echo saved; exit 9' TERM; touch \"$EGERIA_CHECKPOINTS/$EGERIA_ATTEMPT\"\n"
            "test $EGERIA_ATTEMPT = 3 && exit; echo $PPID > watcher; touch up; while :; do sleep 0.1; done"
        )
        id = add(home, history, script)
        up = home.folder(id).work / "up"
        until(up.exists, 60)
        up.unlink()
        subprocess.run(["scancel", "--signal=USR2", history.get(id).handle], check=True)
        until(up.exists, 200)
        up.unlink()
        assert home.folder(id).status().attempt == 2
        os.kill(int((home.folder(id).work / "watcher").read_text()), signal.SIGKILL)
        assert wait(home, history, id, seconds=200) == ["done"]
        assert history.get(id).attempt == 3
        assert "saved" in home.folder(id).log.read_text()
        assert history.get(id).state is State.DONE
