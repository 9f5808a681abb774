"""The local queue: one process that starts the jobs of a home on this machine, and ends when none is left."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from lightning_egeria.errors import ExecutionError, QueueError, WorkflowError
from lightning_egeria.programs import files
from lightning_egeria.programs.processes import MARK, kill_marked
from lightning_egeria.workflow.history import History, Row
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.jobfolders import JobFolder, State
from lightning_egeria.workflow.ordering import Order, Waiting
from lightning_egeria.workflow.refreshing import keep_state

_LOCK, _LOG = "queue.lock", "queue.log"
_LARGEST_LOG = 2**26
_POLL_S = 0.1
_STARTS_WITHIN_S = 30.0
_WAITS_FOR_ROOM_S = 2.0
_QUEUES: list[subprocess.Popen[bytes]] = []  # that this process has started
_FAIR_SHARE_S = 7 * 86400.0  # what was used before this long is forgotten


class LocalQueue:
    """Starts and watches local jobs. What runs goes on when this process ends, and the next one finds it.

    Args:
        home: of the jobs.
        history: of the home.
        devices: of this machine.
        gpus: whether the devices are GPUs, of which each job then sees its own only.
    """

    def __init__(self, home: Home, history: History, devices: int, gpus: bool = False) -> None:
        self.home, self.history, self.devices, self.gpus = home, history, devices, gpus
        self.order = Order(devices)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._passed: dict[int, frozenset[int]] = {}
        self._said = ""

    def run(self) -> None:
        """Work until no job is left."""
        with contextlib.ExitStack() as stack:
            guard = files.open_file(self.home.path / _LOCK, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, guard)
            if not files.try_lock(guard):
                return  # another process is the queue
            while True:
                try:
                    self.step(time.monotonic())
                except (OSError, QueueError) as error:
                    if not self.home.path.is_dir():
                        raise
                    self._wait_for_room(error)
                    continue
                with self.history.transaction():
                    if not self.history.unfinished("local"):
                        # Within the transaction: whoever adds a job afterwards finds that there is no queue.
                        files.unlock(guard)
                        return
                time.sleep(_POLL_S)

    def _wait_for_room(self, error: Exception) -> None:
        """Say what cannot be written, and wait: the disk is full, say, and what runs goes on."""
        if str(error) != self._said:
            self._said = str(error)
            print(f"schedule: {error}. The queue waits", file=sys.stderr, flush=True)
        time.sleep(_WAITS_FOR_ROOM_S)

    def step(self, now: float) -> None:
        """Look at all jobs once: note which have ended, start and stop."""
        rows = self.history.unfinished("local")
        for row in rows:
            if row.state is State.RUNNING and not self._is_running(row):
                self._note_end(row)
        rows = [row for row in self.history.unfinished("local") if row.state is State.RUNNING or self._may_start(row)]
        waiting = {row.id for row in rows if row.state is not State.RUNNING}
        self._passed = {id: passed & waiting for id, passed in self._passed.items()}
        jobs = [
            Waiting(
                *(row.id, row.devices, row.priority, row.share, row.state is State.RUNNING),
                filled=bool(self._passed.get(row.id)),
            )
            for row in rows
        ]
        if not waiting:
            return
        starts, stops = self.order.choose(jobs, self.history.usage(time.time() - _FAIR_SHARE_S), now)
        for id in stops:
            self.home.folder(id).ask(State.PREEMPTED)
        by_id = {row.id: row for row in rows}
        for id, passed in starts.items():
            # A job that was asked to stop holds its devices until it has saved.
            if not stops and self._start(by_id[id], self._free(rows)):
                self._passed[id] = passed

    def _is_running(self, row: Row) -> bool:
        child = self._children.get(row.id)
        if child is not None and child.poll() is None:
            return True
        self._children.pop(row.id, None)
        return self.home.folder(row.id).is_watched

    def _note_end(self, row: Row) -> None:
        folder = self.home.folder(row.id)
        with folder.watched() as free:
            if not free:
                return
            status = folder.status()
            if status.state in (State.RUNNING, State.LOST, State.QUEUED):  # who watched it was killed
                if folder.asked is State.CANCELLED:
                    kill_marked(folder.path)
                    self._refuse(row, State.CANCELLED, "")
                    return
                status.state, status.message = State.LOST, "execute: the process that watched the job was killed"
                folder.tell("schedule", status.message)
                folder.settle(status, retries=0)
        keep_state(self.history, row, folder)

    def _may_start(self, row: Row) -> bool:
        """Whether a job that waits has all that it waits for; cancels it if that cannot be any more."""
        for id in row.after:
            state = self.history.get(id).state
            if state in (State.FAILED, State.CANCELLED):
                self._refuse(row, State.CANCELLED, f"schedule: job {id}, which it comes after, is {state}")
            if state is not State.DONE:
                return False
        if row.devices > self.devices:
            self._refuse(
                row, State.FAILED, f"schedule: needs {row.devices} devices, and this machine has {self.devices}"
            )
            return False
        return True

    def _refuse(self, row: Row, state: State, message: str) -> None:
        folder = self.home.folder(row.id)
        status = folder.status()
        status.state, status.message, status.ended = state, message, time.time()
        folder.write_status(status)
        folder.tell("schedule", message.partition(": ")[2] or state.value)
        keep_state(self.history, row, folder)

    def _free(self, rows: list[Row]) -> list[int]:
        held: set[str] = set()
        for row in rows:
            if (latest := self.history.get(row.id)).state is State.RUNNING:
                held |= set(latest.handle.split(","))
        return [device for device in range(self.devices) if str(device) not in held]

    def _start(self, row: Row, free: list[int]) -> bool:
        folder, token = self.home.folder(row.id), secrets.token_hex(8)
        taken = ",".join(map(str, free[: row.devices]))
        with self.history.transaction():
            if self.history.get(row.id).state.final or len(free) < row.devices:  # cancelled meanwhile
                return False
            self.history.update(row.id, state=State.RUNNING.value, started=time.time(), ended=None, handle=taken)
        folder.give_token(token)
        variables = {"CUDA_VISIBLE_DEVICES": taken} if self.gpus else {}
        try:
            self._children[row.id] = start_execution(folder, token, variables)
        except OSError as error:
            self._refuse(row, State.FAILED, f"schedule: cannot start a process: {error.strerror or error}")
        return True


def start_execution(folder: JobFolder, token: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that watches a job. What it prints itself goes to the log of the job."""
    module = "lightning_egeria.workflow.execution"
    # The folder in which somebody has typed `submit` is no place to import from.
    command = [folder.submission().python, "-P", "-m", module, str(folder.path), token]
    with files.adding(folder.log) as log:
        return _detached(command, {**_inherited(), **variables}, log)


def ensure_queue(home: Home, devices: int | None = None) -> None:
    """Start the queue of a home in the background, unless it runs.

    Raises:
        QueueError: it does not start.
    """
    if queue_runs(home):
        return
    log_path = home.path / _LOG
    command = [sys.executable, "-P", "-m", "lightning_egeria.workflow.local_queue", str(home.path)]
    with files.adding(log_path) as log:
        process = _detached([*command, *([str(devices)] if devices else [])], _inherited(), log)
    # It outlives this process, which must not wait for it.
    _QUEUES[:] = [queue for queue in _QUEUES if queue.poll() is None] + [process]
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None and not queue_runs(home):
        time.sleep(0.02)
    if process.returncode not in (None, 0):
        text = files.read_text(log_path, _LARGEST_LOG, links=False, errors="replace")
        last = text.strip().rpartition("\n")[2]
        raise QueueError(f"the local queue does not start: {last}")


def queue_runs(home: Home) -> bool:
    """Whether the queue of a home runs on this machine."""
    with files.held(home.path / _LOCK) as free:
        return not free


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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, False


def _inherited() -> dict[str, str]:
    # A job may submit others, and these are no part of it.
    return {name: value for name, value in os.environ.items() if name != MARK}


def _detached(command: list[str], variables: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def main(path: str, devices: str | None = None) -> int:
    """Be the queue of a home until no job is left."""
    try:
        found, gpus = devices_here()
        home = Home(Path(path))
        with home.history() as history:
            LocalQueue(home, history, int(devices or found), gpus).run()
    except (WorkflowError, ExecutionError) as error:
        print(f"{error.layer}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
