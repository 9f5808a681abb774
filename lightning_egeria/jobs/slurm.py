"""Slurm through submitit. Slurm keeps the job; the folder of the job keeps the rest."""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.processes import PREEMPTED
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.compiler import Compiled
from lightning_egeria.jobs.execution import Execution, stopping_on_signals
from lightning_egeria.jobs.history import Row
from lightning_egeria.jobs.jobfolders import JobFolder, State
from lightning_egeria.jobs.rundirs import read_run_directory
from lightning_egeria.jobs.sbatch import sbatch_options

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

    name, address = "slurm", ""
    queued = False

    def check(self, compiled: Compiled) -> None:
        """Refuse a number of devices that changes: Slurm keeps the one that a job was submitted with."""
        if compiled.job["resources"]["most_devices"] is not None:
            raise QueueError(f"{compiled.name}: Slurm changes no number of devices. Leave resources.most_devices out")

    def start(self, jobs: Sequence[tuple[Row, JobFolder]]) -> Mapping[int, str]:
        """Hand jobs to sbatch.

        Raises:
            QueueError: there is no Slurm, or it refuses one.
        """
        handles = {}
        for row, folder in jobs:
            job = read_run_directory(Path(row.run))
            gpus = _has_gpus(job["slurm"]["partition"])
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
        executor = submitit.SlurmExecutor(folder=folder.path / "slurm", max_num_timeout=10**6)
        options = sbatch_options(job, gpus)
        options["additional_parameters"] |= _dependency(folder)
        # What a process prints before the job has a log of its own.
        log = ["--output", str(folder.log), "--error", str(folder.log), "--open-mode", "append"]
        executor.update_parameters(**options, srun_args=log)
        return executor.submit(InSlurm(str(folder.path)))


def _has_gpus(partition: str | None) -> bool:
    where = ["--partition", partition] if partition is not None else []
    return "gpu" in _slurm("sinfo", "--noheader", "--format", "%G", *where)


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
