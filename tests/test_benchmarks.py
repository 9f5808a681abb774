"""The benchmarks still run; what they measure is not looked at."""

import os
import subprocess
import sys

import pytest

from support.leftovers import REPOSITORY


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["step_time.py", "--depth", "8", "--pairs", "1", "--every", "2"],
        ["cached_step.py", "--networks", "resnet18", "--heads", "1", "--batch-size", "2", "--pairs", "1"],
        ["communication.py", "--rate", "0", "--runs", "1", "--steps", "6", "--depths", "2"],
        ["snapshot.py", "--width", "16", "--depth", "1", "--repeats", "1"],
        ["branch_tuning.py", "--seeds", "0", "--epochs", "1"],
        ["goodput.py", "--batch", "4", "--pairs", "2", "--block", "2"],
        ["graph_pipeline.py", "--milliseconds", "2", "--steps", "1", "--micro-batches", "4"],
        ["graph_pipeline.py", "--chain", "--milliseconds", "2", "--steps", "1"],
        ["partial_backprop.py", "--rounds", "1"],
        ["partial_backprop.py", "--straggler", "1", "--rounds", "1", "--steps", "4"],
        ["overhead.py", "--threads", "1", "--every", "20", "--pairs", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_benchmark_runs(arguments, tmp_path):
    script, *options = arguments
    run = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks" / script, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) > 2
