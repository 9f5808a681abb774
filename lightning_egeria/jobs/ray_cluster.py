"""Ray, through Ray Jobs: a cluster whose nodes see the home and have this Python, or one that is started here."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import StateApiClient
from ray.util.state.common import ListApiOptions, StateResource
from ray.util.state.exception import RayStateApiException

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.arguments import quantity
from lightning_egeria.core.programs.processes import kill_marked
from lightning_egeria.core.programs.terminal import say
from lightning_egeria.errors import ExecutionError, QueueError
from lightning_egeria.jobs.jobfolders import JobFolder
from lightning_egeria.jobs.machine import devices_here, execution_command, inherited, processors_here, resources_here
from lightning_egeria.jobs.rundirs import read_run_directory

_ENDED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.SUCCEEDED)
_MOST_NODES = 10_000
_NODE_LABEL = "ray.io/node-id"
_PORT = 8265  # where a Ray that is started by hand answers
_ANSWERS_WITHIN_S = 5.0
_LARGEST_ANSWER = 2**16
_STARTS_WITHIN_S = _ANSWERS_AGAIN_WITHIN_S = 120.0
_AGAIN_AFTER_S = 60.0  # after a start that failed
# Names of sockets have room for 107 characters, and Ray's own part takes 66: a home or TMPDIR may be too long.
_FOLDER = "/tmp"
_STORE = 100 * 2**20  # bytes for objects, which jobs do not use; Ray wants 75 MiB at least
_LARGEST_LOG = 2**26


def address_here() -> str:
    """Return the address of the cluster that RAY_ADDRESS names, or that runs on this machine; empty without one."""
    named = os.environ.get("RAY_ADDRESS") or "auto"
    if named != "auto":
        return named
    here = f"http://127.0.0.1:{_PORT}"
    try:
        # Ray's own client waits for ever for a program that listens there and never answers.
        with build_opener(ProxyHandler({})).open(f"{here}/api/version", timeout=_ANSWERS_WITHIN_S) as answer:
            return here if b"ray_version" in answer.read(_LARGEST_ANSWER) else ""
    except HTTPError as error:
        return here if error.code in (401, 403) else ""  # it wants a token
    except (OSError, HTTPException):
        return ""


class RayCluster:
    """Runs jobs on the nodes of a Ray cluster. A device is a GPU if the cluster has any, else a CPU.

    Args:
        address: of its dashboard.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._headers: dict[str, str] | None = None  # with a token; None takes the token of the environment
        self._before: list[str] = []  # of the command of a job
        self._known: JobSubmissionClient | None = None
        self._resources: dict[str, dict[str, Any]] = {}  # of each node, by its id
        self._gpus = False

    def nodes(self) -> dict[str, int]:
        """Return the devices of each node by its id.

        Raises:
            QueueError: no cluster answers.
        """
        self._client()  # says best why none answers
        try:
            # Filtered here: Ray takes those that its own filter leaves out for missing ones, and refuses to answer.
            asked = StateApiClient(self.address, headers=self._headers)
            listed = asked.list(StateResource.NODES, ListApiOptions(limit=_MOST_NODES), raise_on_missing_output=True)
            alive = [node for node in listed if node.state == "ALIVE"]
        except (RayStateApiException, OSError, RayError) as error:
            self._known = None
            raise self._silent() from error
        self._resources = {node.node_id: node.resources_total for node in alive}
        self._gpus = any(has.get("GPU") for has in self._resources.values())
        device = "GPU" if self._gpus else "CPU"
        return {id: int(has[device]) for id, has in sorted(self._resources.items()) if has.get(device, 0) >= 1}

    def claim(self, folder: JobFolder, devices: int, taken: Sequence[str]) -> str:
        """Return a handle for an attempt of a job: the id that Ray is to give it."""
        return f"egeria-{folder.path.name}-{os.urandom(8).hex()}"

    def start(self, folder: JobFolder, node: str, devices: int, handle: str, token: str) -> None:
        """Start the process that watches a job, on a node.

        Raises:
            QueueError: no cluster answers, or it refuses the job.
            ExecutionError: no node has the memory and processor cores that the job asks for.
        """
        resources = read_run_directory(Path(folder.submission().run))["resources"]
        cpus = devices * (resources["cpus_per_device"] or 1) if self._gpus else devices
        memory = quantity(resources["memory"]) if resources["memory"] else 0
        if not any(has.get("memory", 0) >= memory and has.get("CPU", 0) >= cpus for has in self._resources.values()):
            raise ExecutionError(
                f"no node has {cpus} CPUs and {resources['memory'] or 'any'} memory. Lower resources.memory or "
                "resources.cpus_per_device"
            )
        client = self._client()
        try:
            client.submit_job(
                entrypoint=shlex.join([*self._before, *execution_command(folder, token)]),
                submission_id=handle,
                entrypoint_num_cpus=cpus,
                entrypoint_num_gpus=devices if self._gpus else None,
                entrypoint_memory=memory or None,
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

    def end(self, folder: JobFolder, handle: str) -> None:
        """End a job, as `stop` does."""
        self.stop(handle)

    def close(self) -> None:
        """Do nothing: the cluster belongs to others, and what runs there continues."""

    def _client(self) -> JobSubmissionClient:
        if self._known is None:
            try:
                self._known = JobSubmissionClient(self.address, headers=self._headers)
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


class StartedRay(RayCluster):
    """A Ray on this machine for the jobs of one queue: started when a job needs it, and stopped with the queue.

    Only who knows its token can use it: this process, and the jobs.

    Args:
        log: file for what it says.
    """

    def __init__(self, log: Path) -> None:
        super().__init__("")
        self._log, self._folder = log, Path()
        self._before = ["env", f"TMPDIR={os.environ.get('TMPDIR', '')}"]  # Ray's own files go to its folder
        self._keeper: subprocess.Popen[bytes] | None = None
        self._until = 0.0  # when it has to answer, or may be started again
        self._answers, self._failed = False, ""

    def nodes(self) -> dict[str, int]:
        """Return the devices of this machine by the id that Ray gave it; none while Ray starts.

        Raises:
            QueueError: it does not start.
        """
        if self._keeper is None and time.monotonic() >= self._until:
            self._until = time.monotonic() + _AGAIN_AFTER_S
            try:
                self._start()
            except OSError as error:
                self._failed = f"Ray cannot be started on this machine: {error}"
        if self._keeper is None:
            raise QueueError(self._failed)
        ended = self._keeper.poll()
        try:
            nodes = super().nodes() if ended is None else {}
        except QueueError:
            nodes = {}
        if nodes:
            if not self._answers:
                say(f"schedule: Ray was started on this machine with {resources_here()}")
            self._answers, self._until = True, time.monotonic() + _ANSWERS_AGAIN_WITHIN_S
        if ended is not None or (not nodes and time.monotonic() >= self._until):
            self._until = time.monotonic() + (0.0 if self._answers else _AGAIN_AFTER_S)
            self._failed = self._reason("it does not answer" if ended is None else f"it ended with status {ended}")
            self.close()
            raise QueueError(self._failed)
        return nodes

    def runs(self, folder: JobFolder, handle: str) -> bool:
        """Whether Ray has started a job, or is about to. What an earlier one had started ended with it.

        Raises:
            QueueError: it does not answer any more.
        """
        return self._answers and super().runs(folder, handle)

    def close(self) -> None:
        """Stop it. Jobs that still run save first."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        kill_marked(self._folder)  # the keeper was killed
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keeper, self._answers, self._known = None, False, None

    def _start(self) -> None:
        port, unused = _free_ports()
        token = secrets.token_hex(16)
        self.address, self._headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}
        devices, gpus = devices_here()
        options = [
            *("--node-ip-address=127.0.0.1", "--port=0", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"),
            # Another Ray of this machine may have the ports that are usual.
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            *(f"--ray-client-server-port={unused}", f"--object-store-memory={_STORE}", "--log-color=false"),
            *(f"--num-cpus={processors_here() if gpus else devices}", f"--num-gpus={devices if gpus else 0}"),
        ]
        files.write_whole(self._log, "", files.PRIVATE)
        self._folder = Path(tempfile.mkdtemp(prefix="egeria-ray-", dir=_FOLDER))  # the keeper removes it
        variables = inherited() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "TMPDIR": str(self._folder)}
        variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
        command = [sys.executable, "-P", "-m", "lightning_egeria.jobs.ray_keeper", str(self._folder), str(self._log)]
        with files.adding(self._log) as log:
            self._keeper = subprocess.Popen(
                [*command, *options],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until = time.monotonic() + _STARTS_WITHIN_S

    def _reason(self, why: str) -> str:
        text = files.read_text(self._log, _LARGEST_LOG, links=False, errors="replace").strip()
        last = f": {line}" if (line := text.rpartition("\n")[2]) else ""
        return f"Ray does not run on this machine: {why}{last}. {self._log} has all that it said"


def _free_ports() -> tuple[int, int]:
    """Return two ports on which no program listens now."""
    with contextlib.closing(socket.socket()) as first, contextlib.closing(socket.socket()) as second:
        first.bind(("", 0))
        second.bind(("", 0))
        return first.getsockname()[1], second.getsockname()[1]
