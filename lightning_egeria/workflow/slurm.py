"""Slurm through submitit. Slurm keeps the job; the folder of the job keeps the rest."""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from lightning_egeria.errors import QueueError
from lightning_egeria.programs import files
from lightning_egeria.workflow.compiler import Compiled
from lightning_egeria.workflow.execution import Execution, stopping_on_signals
from lightning_egeria.workflow.history import Row
from lightning_egeria.workflow.jobfolders import JobFolder, State
from lightning_egeria.workflow.launch import PREEMPTED, slurm_options, slurm_requeue
from lightning_egeria.workflow.rundirs import read_run_directory
from lightning_egeria.workflow.schema import quantity

_LARGEST = 2**20  # of the file with the ids


class InSlurm:
    """What submitit runs on the node: the job, until it ends or has to make room.

    Args:
        path: folder of the job.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> int:
        """Run the job. After a signal to save, the exit status lets the batch script put it into the queue again."""
        execution = Execution(Path(self.path))
        with stopping_on_signals(execution):
            status = execution.run()
        if status == PREEMPTED:
            sys.exit(PREEMPTED)
        return status


class Slurm:
    """The Slurm that `sbatch` of this machine talks to."""

    name = "slurm"
    waits = True

    def check(self, compiled: Compiled) -> None:
        """Refuse a job without a time limit."""
        if compiled.job["resources"]["time"] is None:
            raise QueueError(f"{compiled.name}: Slurm needs a limit: set resources.time, as in 2h")

    def start(self, jobs: Sequence[tuple[Row, JobFolder]]) -> Mapping[int, str]:
        """Hand jobs to sbatch.

        Raises:
            QueueError: there is no Slurm, or it refuses one.
        """
        handles = {}
        gpus = self._has_gpus() if jobs else False
        for row, folder in jobs:
            job = read_run_directory(Path(row.run))
            try:
                handles[row.id] = self._submitted(job, folder, gpus).job_id
            except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
                raise QueueError(f"sbatch refuses job {row.id}: {' '.join(str(error).split())}") from error
        return handles

    def cancel(self, row: Row) -> None:
        """End a job that waits. One that runs is ended by the process that watches it."""
        if row.state is not State.RUNNING and row.handle:
            _slurm("scancel", row.handle)

    def lost(self, rows: Sequence[Row]) -> set[int]:
        """Return the jobs that the queue of Slurm does not list."""
        listed = set(_slurm("squeue", "--noheader", "--user", getpass.getuser(), "--format", "%A").split())
        return {row.id for row in rows if row.handle not in listed}

    def _submitted(self, job: Mapping[str, Any], folder: JobFolder, gpus: bool) -> submitit.Job[int]:
        options = slurm_options(job)
        executor = submitit.SlurmExecutor(folder=folder.path / "slurm", max_num_timeout=10**6)
        devices = job["resources"]["devices"]
        executor.update_parameters(
            job_name=options["job-name"],
            nodes=options["nodes"],
            ntasks_per_node=1,
            time=options["time"],
            signal_delay_s=quantity(job["checkpoints"]["grace"]),
            setup=[f"trap '{slurm_requeue('$?')}' EXIT"],
            # What a process prints before the job has a log of its own.
            srun_args=["--output", str(folder.log), "--error", str(folder.log), "--open-mode", "append"],
            **({"mem": options["mem"]} if "mem" in options else {}),
            **({"gpus_per_node": devices} if gpus else {"cpus_per_task": devices}),
            additional_parameters={"requeue": True, **_dependency(folder)},
        )
        return executor.submit(InSlurm(str(folder.path)))

    def _has_gpus(self) -> bool:
        return "gpu" in _slurm("sinfo", "--noheader", "--format", "%G")


def _dependency(folder: JobFolder) -> dict[str, str]:
    """Return the ids of Slurm that a job waits for, which its folder names."""
    path = folder.path / "after"
    handles = files.read_text(path, _LARGEST, links=False).split() if path.exists() else []
    return {"dependency": "afterok:" + ":".join(handles)} if handles else {}


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise QueueError(f"there is no {command[0]} here. Submit on a machine of the Slurm cluster") from error
    if done.returncode != 0:
        raise QueueError(f"{command[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout
