"""A Ray cluster, through Ray Jobs. Its nodes must see the home, and have the Python that submits at the same path."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from lightning_egeria.core.programs.arguments import quantity
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.jobfolders import JobFolder
from lightning_egeria.jobs.machine import execution_command
from lightning_egeria.jobs.rundirs import read_run_directory

_ENDED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.SUCCEEDED)
_MOST_NODES = 10_000
_NODE_LABEL = "ray.io/node-id"


def default_address() -> str:
    """Return the address that the environment names, or the one of this machine."""
    return os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"


class RayCluster:
    """Runs jobs on the nodes of a Ray cluster. A device is a GPU if the cluster has any, else a CPU.

    Args:
        address: of its dashboard.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._known: JobSubmissionClient | None = None
        self._gpus = False

    def nodes(self) -> dict[str, int]:
        """Return the devices of each node by its id.

        Raises:
            QueueError: no cluster answers.
        """
        self._client()  # says best why none answers
        try:
            # Filtered here: Ray takes those that its own filter leaves out for missing ones, and refuses to answer.
            alive = [node for node in list_nodes(self.address, limit=_MOST_NODES) if node.state == "ALIVE"]
        except (RayStateApiException, OSError, RayError) as error:
            self._known = None
            raise self._silent() from error
        resources: dict[str, dict[str, Any]] = {node.node_id: node.resources_total for node in alive}
        self._gpus = any(has.get("GPU") for has in resources.values())
        device = "GPU" if self._gpus else "CPU"
        return {id: int(has[device]) for id, has in sorted(resources.items()) if has.get(device, 0) >= 1}

    def claim(self, folder: JobFolder, devices: int, taken: Sequence[str]) -> str:
        """Return a handle for an attempt of a job: the id that Ray is to give it."""
        return f"egeria-{folder.path.name}-{os.urandom(8).hex()}"

    def start(self, folder: JobFolder, node: str, devices: int, handle: str, token: str) -> None:
        """Start the process that watches a job, on a node.

        Raises:
            QueueError: no cluster answers, or it refuses the job.
        """
        resources = read_run_directory(Path(folder.submission().run))["resources"]
        each = resources["cpus_per_device"] or 1
        client = self._client()
        try:
            client.submit_job(
                entrypoint=shlex.join(execution_command(folder, token)),
                submission_id=handle,
                entrypoint_num_cpus=devices * each if self._gpus else devices,
                entrypoint_num_gpus=devices if self._gpus else None,
                entrypoint_memory=quantity(resources["memory"]) if resources["memory"] else None,
                entrypoint_label_selector={_NODE_LABEL: node},
                metadata={"name": folder.submission().name},
            )
        except (RuntimeError, OSError) as error:
            raise QueueError(f"Ray refuses the job: {' '.join(str(error).split())}") from error

    def runs(self, folder: JobFolder, handle: str) -> bool:
        """Whether Ray has started a job, or is about to.

        Raises:
            QueueError: no cluster answers.
        """
        client = self._client()
        try:
            return client.get_job_status(handle) not in _ENDED
        except RuntimeError:  # another cluster answers, which has never had it
            return False
        except OSError as error:
            self._known = None
            raise self._silent() from error

    def stop(self, handle: str) -> None:
        """End a job that Ray has not started yet.

        Raises:
            QueueError: no cluster answers.
        """
        try:
            self._client().stop_job(handle)
        except (RuntimeError, OSError) as error:
            raise self._silent() from error

    def _client(self) -> JobSubmissionClient:
        if self._known is None:
            try:
                self._known = JobSubmissionClient(self.address)
            except (OSError, RuntimeError) as error:
                raise self._silent() from error
            except RayError as error:
                raise QueueError(
                    f"the Ray cluster at {self.address} wants a token. Set RAY_AUTH_MODE and RAY_AUTH_TOKEN"
                ) from error
        return self._known

    def _silent(self) -> QueueError:
        return QueueError(
            f"no Ray cluster answers at {self.address}. Start one, or name another with --address or RAY_ADDRESS"
        )
