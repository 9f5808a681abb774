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
from lightning_egeria.jobs.home import ARRAYS
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
        """Hand jobs to sbatch; those of a sweep as one array.

        Args:
            jobs: of one description, so they have the same options.

        Raises:
            QueueError: there is no Slurm, or it refuses them.
        """
        ids = [row.id for row, _ in jobs]
        job = read_run_directory(Path(jobs[0][0].run))
        gpus = _has_gpus(job["slurm"]["partition"])
        try:
            return dict(zip(ids, self._submitted(job, [folder for _, folder in jobs], gpus), strict=True))
        except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
            which = f"job {ids[0]}" if len(ids) == 1 else f"jobs {ids[0]} to {ids[-1]}"
            raise QueueError(f"sbatch refuses {which}: {' '.join(str(error).split())}") from error

    def cancel(self, row: Row) -> None:
        """End a job that waits. One that runs is ended by the process that watches it."""
        if row.state is not State.RUNNING and row.handle:
            _slurm("scancel", row.handle)

    def lost(self, rows: Sequence[Row]) -> set[int]:
        """Return the jobs that the queue of Slurm does not list."""
        listed = set(_slurm("squeue", "--noheader", "--user", getpass.getuser(), "--array", "--format", "%i").split())
        return {row.id for row in rows if row.handle not in listed}

    def _submitted(self, job: Mapping[str, Any], folders: Sequence[JobFolder], gpus: bool) -> list[str]:
        options, log = sbatch_options(job, gpus), str(folders[0].log)
        own = folders[0].path / "slurm"
        if len(folders) > 1:
            own = folders[0].path.parent.parent / ARRAYS / folders[0].path.name
            own.mkdir(parents=True, mode=0o700)
            for place, folder in enumerate(folders):
                (own / str(place)).symlink_to(folder.log)
            log, options["job_name"] = f"{own}/%a", job["name"].rpartition(".")[0]
        executor = submitit.SlurmExecutor(folder=own, max_num_timeout=10**6)
        options["additional_parameters"] |= _dependency(folders[0])
        # What a process prints before the job has a log of its own.
        output = ["--output", log, "--error", log, "--open-mode", "append"]
        executor.update_parameters(**options, array_parallelism=len(folders), srun_args=output)
        with executor.batch():
            submitted = [executor.submit(InSlurm(str(folder.path))) for folder in folders]
        return [one.job_id for one in submitted]


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
