"""Launch files of a job, as text: shell, Slurm, Ray. They name no machine, so the same job has the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_egeria.workflow.schema import quantity

# The folder of the job comes as argument or variable; what runs comes from the run directory, which it names.
PREEMPTED = 75  # exit status of a job that has saved and wants to go on later: EX_TEMPFAIL of sysexits.h
_MODULE = "lightning_egeria.workflow.execution"
_RUN = f'"${{EGERIA_JOBS_PYTHON:-python3}}" -P -m {_MODULE} "${{1:?the folder of the job}}"'


def shell_script(job: Mapping[str, Any]) -> str:
    """Return a script for sh that runs a job in this process: ``sh run.sh FOLDER_OF_THE_JOB``."""
    return f"#!/bin/sh\n# {job['name']}\nset -eu\nexec {_RUN}\n"


def slurm_options(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of sbatch for a job.

    Slurm sends the signal to save a grace period before the end, and the job may be put into the queue again.
    """
    resources = job["resources"]
    grace = quantity(job["checkpoints"]["grace"])
    options: dict[str, Any] = {
        "job-name": job["name"],
        "nodes": resources["nodes"],
        "ntasks-per-node": 1,
        "cpus-per-task": resources["devices"],
        "requeue": True,
        "open-mode": "append",
        "signal": f"USR2@{grace}",
    }
    if resources["memory"] is not None:
        options["mem"] = f"{quantity(resources['memory']) // 10**6}M"
    if resources["time"] is not None:
        options["time"] = -(-quantity(resources["time"]) // 60)  # minutes, rounded up
    return options


def slurm_script(job: Mapping[str, Any]) -> str:
    """Return a script for sbatch: ``sbatch slurm.sh FOLDER_OF_THE_JOB``."""
    lines = [f"#SBATCH --{name}" + ("" if value is True else f"={value}") for name, value in slurm_options(job).items()]
    run = f"srun --unbuffered {_RUN} || status=$?"
    return "\n".join(["#!/bin/sh", *lines, "set -u", "status=0", run, slurm_requeue("$status"), "exit $status", ""])


def slurm_requeue(status: str) -> str:
    """Return a line of shell that puts the job into the queue again: after it has saved, or after it was killed."""
    return f'case {status} in {PREEMPTED}|137) scontrol requeue "$SLURM_JOB_ID" ;; esac'


def ray_job(job: Mapping[str, Any]) -> str:
    """Return the arguments of a Ray job submission as JSON; {folder} stands for the folder of the job."""
    resources = job["resources"]
    content: dict[str, Any] = {
        "entrypoint": f"${{EGERIA_JOBS_PYTHON:-python3}} -P -m {_MODULE} {{folder}}",
        "entrypoint_num_cpus": resources["devices"],
        "metadata": {"name": job["name"]},
    }
    if resources["memory"] is not None:
        content["entrypoint_memory"] = quantity(resources["memory"])
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
