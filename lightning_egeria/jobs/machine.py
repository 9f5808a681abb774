"""The devices of this machine, and processes on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.processes import MARK
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.jobfolders import JobFolder

HERE = "here"


class ThisMachine:
    """Runs jobs as processes. What runs continues when this process ends.

    Args:
        devices: of this machine.
        gpus: whether the devices are GPUs, of which each job then sees its own only.
    """

    def __init__(self, devices: int, gpus: bool = False) -> None:
        self.devices, self.gpus = devices, gpus
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # by the path of the job's folder

    def nodes(self) -> dict[str, int]:
        """Return the devices of each machine by its name."""
        return {HERE: self.devices}

    def claim(self, folder: JobFolder, devices: int, taken: Sequence[str]) -> str:
        """Return a handle for a job: the numbers of its devices.

        Args:
            folder: of the job.
            devices: how many it gets.
            taken: handles of the jobs that run on the same machine.
        """
        held = {number for handle in taken for number in handle.split(",")}
        return ",".join([str(number) for number in range(self.devices) if str(number) not in held][:devices])

    def start(self, folder: JobFolder, node: str, devices: int, handle: str, token: str) -> None:
        """Start the process that watches a job.

        Raises:
            OSError: it does not start.
        """
        variables = {"CUDA_VISIBLE_DEVICES": handle} if self.gpus else {}
        self._children[str(folder.path)] = start_execution(folder, token, variables)

    def runs(self, folder: JobFolder, handle: str) -> bool:
        """Whether the process that watches a job runs, as far as this back end knows."""
        child = self._children.get(str(folder.path))
        if child is not None and child.poll() is None:
            return True
        self._children.pop(str(folder.path), None)
        return False

    def stop(self, handle: str) -> None:
        """Nothing: the process that watches a job sees itself that it is cancelled."""

    def end(self, folder: JobFolder, handle: str) -> None:
        """Kill the process that watches a job, if this process has started it."""
        child = self._children.pop(str(folder.path), None)
        if child is not None:
            child.kill()
            child.wait()

    def close(self) -> None:
        """Nothing: what runs continues."""


def start_execution(folder: JobFolder, token: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that watches a job. What it prints itself goes to the log of the job."""
    with files.adding(folder.log) as log:
        return detached(execution_command(folder, token), {**inherited(), **variables}, log)


def execution_command(folder: JobFolder, token: str) -> list[str]:
    """Return the command that watches a job."""
    # The folder in which somebody has typed `submit` is no place to import from.
    return [folder.submission().python, "-P", "-m", "lightning_egeria.jobs.execution", str(folder.path), token]


def devices_here() -> tuple[int, bool]:
    """Return how many devices this machine has, and whether they are GPUs; without any, the cores count.

    The variable EGERIA_DEVICES goes before what is found.

    Raises:
        QueueError: it is no number.
    """
    found, gpus = _devices_found()
    wanted = os.environ.get("EGERIA_DEVICES") or str(found)
    if not wanted.isdecimal() or int(wanted) < 1:
        raise QueueError(f"EGERIA_DEVICES: expected a number of devices, got {wanted!r}")
    return int(wanted), gpus


def _devices_found() -> tuple[int, bool]:
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
        if gpus:
            return gpus, True
    return processors_here(), False


def resources_here() -> str:
    """Return the devices of this machine, as text.

    Raises:
        QueueError: as `devices_here`.
    """
    devices, gpus = devices_here()
    counts = {"GPU": devices, "CPU": processors_here()} if gpus else {"CPU": devices}
    return " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items())


def processors_here() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def inherited() -> dict[str, str]:
    """Return the environment of this process without what makes a process part of a job, which may submit others."""
    return {name: value for name, value in os.environ.items() if name != MARK}


def detached(command: list[str], variables: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that continues when this one ends."""
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
