"""Options of sbatch for a job, as submitit names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_egeria.core.programs.arguments import quantity
from lightning_egeria.core.programs.processes import PREEMPTED

# Puts a job into the queue again after it has saved, or after it was killed.
REQUEUE = f'case $? in {PREEMPTED}|137) scontrol requeue "$SLURM_JOB_ID" ;; esac'


def sbatch_options(job: Mapping[str, Any], gpus: bool) -> dict[str, Any]:
    """Return the options of a job.

    Slurm sends the signal to save a grace period before the end, and the job may be put into the queue again. What the
    description leaves out is left to Slurm.

    Args:
        job: content of its `job.json`.
        gpus: whether devices are GPUs.

    >>> job = {"name": "a", "checkpoints": {"grace": "60s"}, "slurm": {"partition": "long", "extra": {"nice": "5"}}}
    >>> job["resources"] = {"nodes": 1, "devices": 2, "cpus_per_device": 4, "memory": "16GB", "time": "90s"}
    >>> options = sbatch_options(job, gpus=True)
    >>> options["gpus_per_node"], options["cpus_per_task"], options["mem"], options["time"], options["partition"]
    (2, 8, '16000M', 2, 'long')
    >>> options["additional_parameters"]
    {'requeue': True, 'nice': '5'}
    """
    resources, slurm = job["resources"], dict(job["slurm"])
    extra = {name: True if value == "true" else value for name, value in slurm.pop("extra").items()}
    options: dict[str, Any] = {
        "job_name": job["name"],
        "nodes": resources["nodes"],
        "ntasks_per_node": 1,
        "signal_delay_s": quantity(job["checkpoints"]["grace"]),
        "setup": [f"trap '{REQUEUE}' EXIT"],
        "additional_parameters": {"requeue": True, **extra},
        "time": None,  # submitit would ask for 5 minutes
        **{name: value for name, value in slurm.items() if value is not None},
    }
    if gpus:
        options["gpus_per_node"] = resources["devices"]
        if resources["cpus_per_device"] is not None:
            options["cpus_per_task"] = resources["devices"] * resources["cpus_per_device"]
    else:
        options["cpus_per_task"] = resources["devices"]
    if resources["memory"] is not None:
        options["mem"] = f"{quantity(resources['memory']) // 10**6}M"
    if resources["time"] is not None:
        options["time"] = -(-quantity(resources["time"]) // 60)  # minutes, rounded up
    return options
