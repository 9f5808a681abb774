"""What one attempt of a job needs: its Python, its data, its folder, its command and its environment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.processes import CHECKPOINT
from lightning_egeria.errors import ExecutionError
from lightning_egeria.jobs.environments import python_of
from lightning_egeria.jobs.jobfolders import JobFolder, Status
from lightning_egeria.jobs.rundirs import CODE, digest_of, explanation_in, listed, lock_in


def python_for(job: Mapping[str, Any], run: Path, environments: Path, folder: JobFolder) -> str:
    """Return the Python that runs the job: of its own environment if it names requirements, else this one.

    Raises:
        ExecutionError: the environment cannot be made.
    """
    if not job["own_environment"]:
        return sys.executable
    return str(python_of(lock_in(run), environments, lambda line: folder.tell("environment", line)))


def data_for(job: Mapping[str, Any], origin: Path, folder: JobFolder) -> dict[str, str]:
    """Return the path of each data set, by the variable that tells it; copies those that are staged.

    Raises:
        ExecutionError: it is missing, or is not what its digest says.
    """
    paths = {}
    for name, data in job["data"].items():
        path = origin / data["path"]
        if not path.exists():
            raise ExecutionError(f"data.{name}: {path} does not exist on this machine")
        if data["stage"]:
            path = _staged(path, folder.data / name, data["digest"], name)
        elif data["digest"] is not None and (found := digest_of(path)) != data["digest"]:
            raise ExecutionError(f"data.{name}: {path} has the digest {found}, expected {data['digest']}")
        paths[f"EGERIA_DATA_{name.upper()}"] = str(path)
    return paths


def work_for(run: Path, folder: JobFolder) -> None:
    """Copy the files of the run directory to where the job works, before its first attempt."""
    for name in listed(run):
        if name.startswith(f"{CODE}/") and not os.path.lexists(target := folder.work / name.removeprefix(f"{CODE}/")):
            target.parent.mkdir(parents=True, exist_ok=True)
            files.copy(run / name, target, links=False)


def variables_for(job: Mapping[str, Any], folder: JobFolder, status: Status, data: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the job.

    Raises:
        ExecutionError: a secret is not set here.
    """
    missing = [name for name in job["environment"]["secrets"] if name not in os.environ]
    if missing:
        raise ExecutionError(
            f"{', '.join(missing)}: not set in the environment of the process that runs the job. The queue has that of "
            f"the command which started it"
        )
    # An experiment runs on one node and starts its ranks itself; Lightning would want those of Slurm.
    keep = job["entry"]["experiment"] is None
    inherited = {name: value for name, value in os.environ.items() if keep or not name.startswith("SLURM_")}
    submission = folder.submission()
    own = {
        "EGERIA_JOB_ID": str(submission.id),
        "EGERIA_JOB_NAME": submission.name,
        "EGERIA_ATTEMPT": str(status.attempt),
        "EGERIA_JOB_DEVICES": str(status.devices),
        "EGERIA_HINTS": str(folder.hints),
        "EGERIA_CHECKPOINTS": str(folder.checkpoints),
        "EGERIA_RESULTS": str(folder.results),
        "PYTHONUNBUFFERED": "1",
    }
    if not keep:  # for the report of the run
        own["EGERIA_METHODS"] = "; ".join(explanation_in(Path(submission.run)).splitlines())
    return {**inherited, **own, **data, **job["environment"]["variables"]}


def command_for(job: Mapping[str, Any], folder: JobFolder, python: str, devices: int) -> list[str]:
    """Return the command of the job; an experiment resumes from its last checkpoint, if it has one.

    Args:
        job: content of its `job.json`.
        folder: of the job.
        python: that runs it.
        devices: that it has now.
    """
    entry = job["entry"]
    if entry["experiment"] is None:
        command = entry["command"]
        if isinstance(command, str):
            return ["/bin/sh", "-c", command]
        return [python, *command[1:]] if command[0] in ("python", "python3") else list(command)
    from lightning_egeria.jobs.experiments import arguments_of

    arguments = arguments_of(entry["experiment"], entry["overrides"])
    adapts, hints = "goodput" in job.get("methods", ()), quoted(folder.hints)
    if not adapts:
        telling = "+callbacks.telling"
        arguments.append(f"{telling}._target_=lightning_egeria.jobs.remaining.RemainingTime")
        arguments.append(f"{telling}.hints={hints}")
    arguments.append(f"run_dir={quoted(folder.results)}")
    if job["resources"]["most_devices"] is not None:
        arguments.append(f"trainer.devices={devices}")
    if adapts:
        arguments.append(f"goodput.hints={hints}")
    if (folder.checkpoints / CHECKPOINT).exists():
        arguments.append(f"ckpt_path={quoted(folder.checkpoints / CHECKPOINT)}")
    return [python, "-m", "lightning_egeria.cli.train", *arguments]


def quoted(path: Path) -> str:
    r"""Return a path as value of an override of Hydra.

    >>> print(quoted(Path("/a b/it's")))
    '/a b/it\'s'
    """
    return "'" + str(path).replace("'", "\\'") + "'"


def _staged(path: Path, target: Path, digest: str, name: str) -> Path:
    if not target.exists():
        beside = target.with_name(f".{target.name}")
        shutil.rmtree(beside, ignore_errors=True)
        beside.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.is_dir():
                shutil.copytree(path, beside, copy_function=_copied)
            else:
                files.copy(path, beside)
        except (OSError, shutil.Error) as error:
            raise ExecutionError(f"data.{name}: cannot copy {path}: {error}") from error
        beside.rename(target)
    found = digest_of(target)
    if found != digest:
        raise ExecutionError(f"data.{name}: the copy of {path} has the digest {found}, expected {digest}")
    return target


def _copied(source: str, target: str) -> str:
    files.copy(Path(source), Path(target))
    shutil.copystat(source, target)  # what is executable stays so
    return target


def explain_command(command: list[str]) -> str:
    """Return a command for the log, with each argument quoted.

    >>> explain_command(["echo", "a b"])
    '["echo", "a b"]'
    """
    return json.dumps(command, ensure_ascii=False)
