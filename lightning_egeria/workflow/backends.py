"""The back ends by name. Those that need an extra are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.compiler import Compiled
from lightning_egeria.workflow.history import Row
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.jobfolders import JobFolder
from lightning_egeria.workflow.local_queue import devices_here, ensure_queue
from lightning_egeria.workflow.submission import Backend

NAMES = ("local", "slurm", "ray")


class Local:
    """The local queue of a home.

    Args:
        home: of the jobs.
    """

    name = "local"
    waits = True

    def __init__(self, home: Home) -> None:
        self.home = home

    def check(self, compiled: Compiled) -> None:
        """Refuse a job that this machine has not enough devices for."""
        resources = compiled.job["resources"]
        devices, _ = devices_here()
        if resources["nodes"] > 1 or resources["devices"] > devices:
            raise QueueError(
                f"{compiled.name}: wants nodes={resources['nodes']} with devices={resources['devices']} each, this "
                f"machine is one with {devices}. Use -b slurm, or set EGERIA_DEVICES"
            )

    def start(self, jobs: Sequence[tuple[Row, JobFolder]]) -> Mapping[int, str]:
        """See that the queue runs; it finds the jobs itself."""
        ensure_queue(self.home)
        return {}

    def cancel(self, row: Row) -> None:
        """See that the queue runs: the process that watched the job may have been killed."""
        ensure_queue(self.home)

    def lost(self, rows: Sequence[Row]) -> set[int]:
        """None: the next queue finds what the last one left."""
        return set()


def backend(name: str, home: Home) -> Backend:
    """Return a back end.

    Raises:
        QueueError: its extra is not installed.
    """
    try:
        if name == "slurm":
            from lightning_egeria.workflow.slurm import Slurm

            return Slurm()
        if name == "ray":
            from lightning_egeria.workflow.ray_jobs import RayJobs

            return RayJobs()
    except ModuleNotFoundError as error:
        raise QueueError(f"{name} needs {error.name}. Run: pip install 'lightning-egeria[{name}]'") from error
    return Local(home)
