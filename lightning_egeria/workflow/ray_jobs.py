"""Ray Jobs. The cluster must see the home, and have the Python that submits at the same path."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.compiler import Compiled
from lightning_egeria.workflow.history import Row
from lightning_egeria.workflow.jobfolders import JobFolder, State
from lightning_egeria.workflow.rundirs import read_run_directory
from lightning_egeria.workflow.schema import quantity

_ENDED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.SUCCEEDED)


class RayJobs:
    """The Ray cluster at ``RAY_ADDRESS``, or the one of this machine.

    Raises:
        QueueError: there is none.
    """

    name = "ray"
    waits = False

    def __init__(self) -> None:
        address = os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"
        try:
            self._client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError) as error:
            raise QueueError(f"no Ray cluster answers at {address}. Start one, or set RAY_ADDRESS") from error
        except RayError as error:
            raise QueueError(
                f"the Ray cluster at {address} wants a token. Set RAY_AUTH_MODE and RAY_AUTH_TOKEN"
            ) from error

    def check(self, compiled: Compiled) -> None:
        """Refuse several nodes."""
        if compiled.job["resources"]["nodes"] > 1:
            raise QueueError(f"{compiled.name}: Ray Jobs starts one process on one node. Use resources.nodes=1")

    def start(self, jobs: Sequence[tuple[Row, JobFolder]]) -> Mapping[int, str]:
        """Submit jobs.

        Raises:
            QueueError: Ray refuses one.
        """
        handles = {}
        for row, folder in jobs:
            resources = read_run_directory(Path(row.run))["resources"]
            command = [sys.executable, "-P", "-m", "lightning_egeria.workflow.execution", str(folder.path)]
            memory = quantity(resources["memory"]) if resources["memory"] else None
            try:
                handles[row.id] = self._client.submit_job(
                    entrypoint=shlex.join(command),
                    entrypoint_num_cpus=resources["devices"],
                    entrypoint_memory=memory,
                    metadata={"name": row.name},
                )
            except RuntimeError as error:
                raise QueueError(f"Ray refuses job {row.id}: {' '.join(str(error).split())}") from error
        return handles

    def cancel(self, row: Row) -> None:
        """End a job that waits. One that runs is ended by the process that watches it."""
        if row.state is not State.RUNNING and row.handle:
            self._client.stop_job(row.handle)

    def lost(self, rows: Sequence[Row]) -> set[int]:
        """Return the jobs that have ended, or that this cluster has never seen."""
        return {row.id for row in rows if self._has_ended(row.handle)}

    def _has_ended(self, handle: str) -> bool:
        try:
            return self._client.get_job_status(handle) in _ENDED
        except RuntimeError:
            return True
