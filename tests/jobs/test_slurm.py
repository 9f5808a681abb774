"""With the Slurm of this machine, if it has one: `sinfo` answers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.backends import backend
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.submission import cancel, refresh, resume, submit
from support.jobs import stopped
from support.jobs.described import described, until

pytest.importorskip("submitit", reason="submitit is an extra")

from lightning_egeria.jobs import slurm


def listed(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def answers():
    return bool(shutil.which("sinfo")) and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0


real = [pytest.mark.slow, pytest.mark.skipif(not answers(), reason="no Slurm answers `sinfo` on this machine")]


VARIABLES = "{OMP_NUM_THREADS: 1, CUDA_VISIBLE_DEVICES: ''}"


def pids(pattern, how="-f"):
    found = subprocess.run(["pgrep", how, pattern], capture_output=True, text=True, check=False).stdout.split()
    return [pid for pid in map(int, found) if pid != os.getpid()]


def kill(pattern, how="-f"):
    """Kill what a test has started; returns when it is gone."""
    found = pids(pattern, how)
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not pids(pattern, how), 20)


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


def test_without_slurm_or_with_a_number_of_devices_that_changes(home, history, monkeypatch):
    with pytest.raises(QueueError, match=r"Slurm changes no number of devices. Leave resources\.most_devices out"):
        add(home, history, "true", **{"resources.most_devices": 2})
    with pytest.raises(QueueError, match="Slurm decides itself which jobs run"):
        backend("slurm", home, policy="fair")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(QueueError, match="there is no sinfo here"):
        add(home, history, "true")


@pytest.mark.usefixtures("home")
class TestReal:
    pytestmark = real

    def test_three_jobs_dependencies_and_failures(self, home, history):
        ids = [add(home, history, "echo x >> ../../ran; sleep 1") for _ in range(3)]
        last = add(home, history, "wc -l < ../../ran", after=ids)
        bad = add(home, history, "exit 3")
        assert wait(home, history, *ids, last, bad) == ["done"] * 4 + ["failed"]
        assert "\n3\n" in home.folder(last).log.read_text()
        assert history.get(bad).status.message == "execute: ended with status 3; its log says why"

    def test_a_sweep_is_one_array(self, home, history):
        description = described(
            home.path.parent, **{"entry.command": "echo $X; exit $X", "sweep": "{X: ['0', '3', '0 ']}", "name": "swept"}
        )
        compiled = home.compiler(history).compile(description)
        ids = submit(home, history, slurm.Slurm(), compiled, description.folder)
        handles = [history.get(id).handle for id in ids]
        array = handles[0].partition("_")[0]
        assert handles == [f"{array}_{place}" for place in range(3)]
        assert "JobName=swept\n" in listed("scontrol", "show", "job", handles[0])
        assert wait(home, history, *ids) == ["done", "failed", "done"]
        for id, printed in zip(ids, ("0", "3", "0"), strict=True):
            assert f"\n{printed}\n" in home.folder(id).log.read_text()
        resume(home, history, slurm.Slurm(), ids[1])
        assert "_" not in history.get(ids[1]).handle  # alone
        assert wait(home, history, ids[1]) == ["failed"]

    def test_jobs_of_an_array_are_cancelled_one_by_one(self, home, history):
        description = described(
            home.path.parent, **{"entry.command": "touch up; exec sleep $X", "sweep": "{X: ['100', '2']}"}
        )
        compiled = home.compiler(history).compile(description)
        first, second = submit(home, history, slurm.Slurm(), compiled, description.folder)
        until(lambda: (home.folder(first).work / "up").exists(), 60)
        refresh(home, history, {"slurm": slurm.Slurm()})
        cancel(home, history, slurm.Slurm(), first)
        assert wait(home, history, first, second) == ["cancelled", "done"]
        until(lambda: history.get(first).handle not in listed("squeue", "--array", "--format", "%i"), 60)

    def test_options_reach_slurm(self, home, history):
        options = {"partition": "all", "extra": {"comment": "mine", "exclusive": "true", "nice": "3"}}
        keys = {"slurm": json.dumps(options), "resources.time": "~"}
        id = add(home, history, "sleep 2", **keys)
        shown = listed("scontrol", "show", "job", history.get(id).handle)
        for wanted in (
            "Partition=all",
            "Comment=mine",
            "Nice=3",
            "TimeLimit=UNLIMITED",
            "CPUs/Task=1",
            "OverSubscribe=NO",
        ):
            assert wanted in shown, shown
        assert wait(home, history, id) == ["done"]
        refused = {"slurm": json.dumps({"partition": "no-such"})}
        with pytest.raises(QueueError, match=r"sinfo failed|sbatch refuses"):
            add(home, history, "true", **refused)

    def test_cancel(self, home, history):
        running = add(home, history, "touch up; exec sleep 100")
        waiting = add(home, history, "true", after=[running])
        until(lambda: (home.folder(running).work / "up").exists(), 60)
        refresh(home, history, {"slurm": slurm.Slurm()})
        cancel(home, history, slurm.Slurm(), waiting)
        cancel(home, history, slurm.Slurm(), running)
        assert wait(home, history, running, waiting) == ["cancelled", "cancelled"]
        until(lambda: history.get(running).handle not in listed("squeue"), 60)

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
        assert history.get(id).status.attempt == 3
        assert "saved" in home.folder(id).log.read_text()
        assert history.get(id).state is State.DONE

    @pytest.mark.parametrize("way", ["signal", "kill of the job", "kill of slurmd", "crash of the node"])
    def test_a_job_ends_bit_for_bit_as_an_uninterrupted_one(self, way, home, history, tmp_path):
        id = add(home, history, [sys.executable, stopped.__file__, "0.5"], **{"environment.variables": VARIABLES})
        folder = home.folder(id)
        until((folder.checkpoints / "last.ckpt").exists, 90)
        handle = history.get(id).handle
        if way == "signal":
            subprocess.run(["scancel", "--signal=USR2", handle], check=True)
        elif way == "kill of the job":
            kill(f"{stopped.__file__} 0.5")
        else:
            command = Path(f"/proc/{pids('slurmd', '-x')[0]}/cmdline").read_text().split("\0")[:-1]
            kill("slurmd", "-x")
            if way == "crash of the node":
                kill(rf"slurmstepd: \[{handle}")
                kill(str(folder.path))
            time.sleep(2)
            assert history.get(id).state.value in ("queued", "running")
            subprocess.run(command, check=True)  # it goes into the background
        assert wait(home, history, id, seconds=400) == ["done"], folder.log.read_text()
        assert history.get(id).status.attempt == (1 if way == "kill of slurmd" else 2)
        whole = stopped.fit(tmp_path / "whole", every_n_steps=1)
        found = torch.load(folder.results / "weights.pt", weights_only=True)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        until(lambda: handle not in listed("squeue"), 60)
