"""The back ends by name. Those that need an extra are imported when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.compiler import Compiled
from lightning_egeria.jobs.history import Row
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import JobFolder
from lightning_egeria.jobs.machine import HERE, devices_here, resources_here
from lightning_egeria.jobs.queue import ensure_queue, machines_of
from lightning_egeria.jobs.scheduling import QueueEntry, Scheduler, policy_named
from lightning_egeria.jobs.submission import Backend

NAMES = ("local", "slurm", "ray")


class Queued:
    """Machines whose jobs the queue of a home starts.

    Args:
        home: of the jobs.
        name: ``"local"`` or ``"ray"``.
        address: of the Ray cluster; empty for this machine, where the queue starts Ray if that is wanted.
        policy: that the queue shall follow from the next job on; None keeps the one it follows.
    """

    queued = True

    def __init__(self, home: Home, name: str = "local", address: str = "", policy: str | None = None) -> None:
        self.home, self.name, self.address, self.policy = home, name, address, policy
        self._nodes: Mapping[str, int] | None = None

    def check(self, compiled: Compiled) -> None:
        """Refuse a job that no machine has enough devices for, or that the policy cannot serve."""
        resources = compiled.job["resources"]
        if resources["nodes"] > 1:
            raise QueueError(
                f"{compiled.name}: nodes={resources['nodes']}: a job runs on one machine here. Use -b slurm"
            )
        if self._nodes is None:
            here = not self.address
            self._nodes = {HERE: devices_here()[0]} if here else machines_of(self.name, self.address, self.home).nodes()
        if not self._nodes:
            raise QueueError(f"{compiled.name}: the cluster at {self.address} has no devices")
        entry = QueueEntry(0, 0.0, resources["devices"], resources["most_devices"])
        against = Scheduler(policy_named(self.policy or self.home.policy)).refuses(entry, self._nodes)
        if against is not None:
            more = ". Use -b slurm, or set EGERIA_DEVICES" if "machine" in against and not self.address else ""
            raise QueueError(f"{compiled.name}: {against}{more}")

    def start(self, jobs: Sequence[tuple[Row, JobFolder]]) -> Mapping[int, str]:
        """See that the queue runs; it finds the jobs itself."""
        if self.policy is not None:
            self.home.follow(self.policy)
        ensure_queue(self.home)
        if self.name == "ray" and not self.address:
            has = resources_here()
            print(f"no Ray runs here: the queue starts one with {has}, until no job is left", file=sys.stderr)
        return {}

    def cancel(self, row: Row) -> None:
        """See that the queue runs: the process that watched the job may have been killed."""
        ensure_queue(self.home)

    def lost(self, rows: Sequence[Row]) -> set[int]:
        """None: the next queue finds what the last one left."""
        return set()


def backend(name: str, home: Home, address: str = "", policy: str | None = None) -> Backend:
    """Return a back end.

    Args:
        name: one of `NAMES`.
        home: of the jobs.
        address: of the Ray cluster; ``"auto"`` for the one that the environment names or that runs here, or else empty;
            empty for one that the queue starts here.
        policy: of the queue, from now on; None keeps the one it follows.

    Raises:
        QueueError: the back end has no policies, or its extra is not installed.
    """
    try:
        if name == "slurm":
            if policy is not None:
                raise QueueError(f"--policy {policy}: Slurm decides itself which jobs run. Leave the policy out")
            from lightning_egeria.jobs.slurm import Slurm

            return Slurm()
        if name == "ray":
            from lightning_egeria.jobs.ray_cluster import address_here

            return Queued(home, name, address_here() if address == "auto" else address, policy)
    except ModuleNotFoundError as error:
        raise QueueError(f"{name} needs {error.name}. Run: pip install 'lightning-egeria[{name}]'") from error
    return Queued(home, policy=policy)
