"""Kill -9 in the middle of a search: resumed from the last checkpoint, a run ends as the one that was not killed."""

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
from models import Classifier, ConvNet, fit, loader
from ranks import LOCAL

from lightning_egeria import BranchTuner, LogUniform
from lightning_egeria.snapshots.digests import digest


class Killed(Classifier):
    """Kills its process in a call of the training step."""

    count = 0

    def __init__(self, at):
        torch.manual_seed(0)
        super().__init__(ConvNet(dropout=0), lr=1e-3)
        self.at = at

    def training_step(self, batch, batch_idx):
        Killed.count += 1  # of the class: a trial sets those of the module back
        if Killed.count == self.at:
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
    print(json.dumps([digest(dict(module.named_parameters())).hex(), tuner.setting, branches, Killed.count]))


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


if __name__ == "__main__":
    assert tempfile.gettempdir() == sys.argv[1]
    main(Path(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
