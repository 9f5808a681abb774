"""Kill -9, or a signal to stop, in a search: resumed from its last checkpoint, a run ends as one that was let be."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_egeria import BranchTuner, LogUniform, ResumableCheckpoints
from lightning_egeria.core.snapshots.digests import digest
from support import tuning as tally
from support.models import Classifier, ConvNet, fit, loader
from support.ranks import LOCAL


class Killed(Classifier):
    """Kills its process in a call of the training step."""

    def __init__(self, at):
        torch.manual_seed(0)
        super().__init__(ConvNet(dropout=0), lr=1e-3)
        self.at = at

    def training_step(self, batch, batch_idx):
        tally.calls += 1
        if tally.calls == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def main(folder, at, resumes):
    """Train, and print what the run has come to."""
    module = Killed(at)
    tuner = BranchTuner({"lr": LogUniform(1e-3, 1)}, first_steps=2, max_share=100, max_trials=6, at_epochs=(1,))
    tuner.most_state_bytes = 0  # states are in files
    saves = ModelCheckpoint(folder, save_last=True, enable_version_counter=False)
    arguments = {"ckpt_path": folder / "last.ckpt"} if resumes else {}
    fit(module, tuner, saves, data=loader(), enable_checkpointing=True, **arguments)
    branches = [one.branches for one in tuner.searches]
    print(json.dumps([digest(dict(module.named_parameters())).hex(), tuner.setting, branches, tally.calls]))


def run(folder, at=0, resumes=False):
    environment = {**os.environ, **LOCAL, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder), str(at), str(int(resumes))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("at", [8, 17])
def test_a_killed_search_ends_as_one_that_was_not(at, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    first = run(whole)
    assert first.returncode == 0, first.stderr
    *expected, calls = json.loads(first.stdout.splitlines()[-1])
    assert calls > at + 5  # the kill is within the search
    assert run(killed, at).returncode == -signal.SIGKILL
    assert [path.name for path in killed.iterdir() if path.suffix != ".ckpt"] == []  # no states of branches
    again = run(killed, resumes=True)
    assert again.returncode == 0, again.stderr
    *found, _ = json.loads(again.stdout.splitlines()[-1])
    assert found == expected


class Stopped(Killed):
    """Is asked to stop in a call of the training step."""

    def training_step(self, batch, batch_idx):
        if tally.calls + 1 == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            tally.calls += 1
        tally.calls += 1
        return Classifier.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("into", [3, 9])
def test_a_signal_to_stop_ends_a_search(epoch, into, tmp_path):
    """Within its trial; the checkpoint is of where the search began."""

    def train(at, folder, **arguments):
        tally.calls, module = 0, Stopped(at)
        tuner = BranchTuner({"lr": LogUniform(1e-3, 1)}, first_steps=2, max_share=100, max_trials=6, at_epochs=(epoch,))
        try:
            fit(module, tuner, ResumableCheckpoints(folder=folder), data=loader(), **arguments)
        finally:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return digest(dict(module.named_parameters())), tuner.setting, [one.branches for one in tuner.searches]

    expected = train(0, tmp_path / "whole")
    with pytest.raises(SystemExit) as stopped:
        train(5 * epoch + into, tmp_path)
    assert stopped.value.code == 75
    assert tally.calls < 5 * epoch + into + 6
    assert train(0, tmp_path, ckpt_path=tmp_path / "last.ckpt") == expected


if __name__ == "__main__":
    assert tempfile.gettempdir() == sys.argv[1]
    main(Path(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
