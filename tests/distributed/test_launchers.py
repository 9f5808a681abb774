"""The ways in which Lightning comes to several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.distributed import launched
from support.ranks import LOCAL, free_port

SCRIPT = Path(launched.__file__)
TIMEOUT_S = 120


def run(*commands):
    """Run commands beside each other, each a list of arguments and extra environment variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PL_"))}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**inherited, **LOCAL, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments, variables in commands
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)


def check(folder):
    """Both ranks have frozen the same after the same step, and only the first has evaluated."""
    first, second = (json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["ranks"] == second["ranks"] == 2
    assert first["weights"] == second["weights"]
    assert first["events"] == second["events"]
    assert first["events"], "nothing froze"
    assert first["evaluations"] > 0
    assert (second["workers"], second["evaluations"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_notebook"])
def test_launched_by_lightning(strategy, tmp_path):
    run(([SCRIPT, tmp_path, strategy], {"MASTER_PORT": free_port()}))
    check(tmp_path)


@pytest.mark.slow
def test_launched_by_torchrun_on_two_nodes(tmp_path):
    rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    run(
        *(
            (
                [
                    "-m",
                    "torch.distributed.run",
                    *rendezvous,
                    f"--node-rank={node}",
                    SCRIPT,
                    tmp_path,
                    "ddp",
                    "--nodes=2",
                ],
                {},
            )
            for node in (0, 1)
        )
    )
    check(tmp_path)


@pytest.mark.slow
def test_launched_by_slurm(tmp_path):
    """As ``srun`` starts it: once for each task, with these variables."""
    port = free_port()
    run(
        *(
            (
                [SCRIPT, tmp_path, "ddp"],
                {
                    "SLURM_JOB_NAME": "train",
                    "SLURM_JOB_ID": "7",
                    "SLURM_NTASKS": "2",
                    "SLURM_NTASKS_PER_NODE": "2",
                    "SLURM_NNODES": "1",
                    "SLURM_NODEID": "0",
                    "SLURM_NODELIST": "127.0.0.1",
                    "SLURM_PROCID": str(task),
                    "SLURM_LOCALID": str(task),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
            )
            for task in (0, 1)
        )
    )
    check(tmp_path)
