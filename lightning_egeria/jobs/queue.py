"""The queue of a home: one process that starts jobs on this machine and on Ray, and ends when none is left."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.processes import kill_marked
from lightning_egeria.core.programs.terminal import say
from lightning_egeria.errors import ExecutionError, JobError, QueueError
from lightning_egeria.jobs.endings import note_end
from lightning_egeria.jobs.history import History, Row
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import JobFolder, State
from lightning_egeria.jobs.machine import ThisMachine, detached, devices_here, inherited
from lightning_egeria.jobs.scheduling import INTERVAL_S, QueueEntry, Scheduler, policy_named

SERVED = ("local", "ray")
_LOCK, _LOG, _RAY_LOG = "queue.lock", "queue.log", "ray.log"
_LARGEST_LOG = 2**26
_WAITS = "schedule: waits: "
_POLL_S = 0.1
_NODES_S = 2.0  # between two looks at the nodes of a cluster
_STARTS_WITHIN_S = 30.0
_WAITS_FOR_ROOM_S = 2.0
_SILENT_S = 30.0  # without heart-beat, after which a job on a cluster that does not answer is lost
_QUEUES: list[subprocess.Popen[bytes]] = []  # that this process has started


class Machines(Protocol):
    """Where the queue starts jobs."""

    def nodes(self) -> dict[str, int]:
        """Return the devices of each machine by its name."""

    def claim(self, folder: JobFolder, devices: int, taken: Sequence[str]) -> str:
        """Return a handle for an attempt of a job, given those of the jobs that run on the same machine."""

    def start(self, folder: JobFolder, node: str, devices: int, handle: str, token: str) -> None:
        """Start the process that watches a job."""

    def runs(self, folder: JobFolder, handle: str) -> bool:
        """Whether that process runs, or is about to."""

    def stop(self, handle: str) -> None:
        """End what was not started yet."""

    def end(self, folder: JobFolder, handle: str) -> None:
        """End the process that watches a job, at once: its folder cannot be used."""

    def close(self) -> None:
        """Stop what was started for the jobs of this queue, beside the jobs."""


class _Absent:
    """Machines that this process cannot use. They have no nodes, so nothing is started."""

    def __init__(self, error: QueueError) -> None:
        self._error = error

    def nodes(self) -> dict[str, int]:
        raise self._error

    def runs(self, folder: JobFolder, handle: str) -> bool:
        raise self._error

    def close(self) -> None:
        pass


class _Pool:
    """Machines, the scheduler of their jobs, and what was said of them."""

    def __init__(self, machines: Machines, scheduler: Scheduler) -> None:
        self.machines, self.scheduler = machines, scheduler
        self._nodes: dict[str, int] = {}
        self._looked = -_NODES_S
        self.trouble = ""  # why its jobs wait, if it does not answer

    def nodes(self) -> dict[str, int]:
        """Return the devices of each machine; none while a cluster does not answer, which is said once."""
        if time.monotonic() - self._looked >= _NODES_S:
            try:
                self._nodes, self.trouble = self.machines.nodes(), ""
            except QueueError as error:
                if f"{_WAITS}{error}" != self.trouble:
                    self.trouble = f"{_WAITS}{error}"
                    say(self.trouble)
                self._nodes = {}
            self._looked = time.monotonic()
        return self._nodes


def machines_of(backend: str, address: str, home: Home) -> Machines:
    """Return the machines of a back end.

    Args:
        backend: its name.
        address: of the Ray cluster; empty for one that is started here.
        home: of the jobs.

    Raises:
        QueueError: its extra is not installed, or EGERIA_DEVICES is no number.
    """
    if backend == "local":
        return ThisMachine(*devices_here())
    try:
        from lightning_egeria.jobs.ray_cluster import RayCluster, StartedRay
    except ModuleNotFoundError as error:
        raise QueueError(f"ray needs {error.name}. Run: pip install 'lightning-egeria[ray]'") from error
    return RayCluster(address) if address else StartedRay(home.path / _RAY_LOG)


class Queue:
    """Starts and watches jobs. What runs continues when this process ends, and the next one finds it.

    Args:
        home: of the jobs.
        history: of the home.
        machines: returns where the jobs of a back end run, by its name, the address of the cluster and the home.
        interval_s: seconds between two decisions of the policy without a reason.
    """

    def __init__(
        self,
        home: Home,
        history: History,
        machines: Callable[[str, str, Home], Machines] = machines_of,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.home, self.history = home, history
        self._machines, self._interval_s = machines, interval_s
        self._policy = ""
        self._pools: dict[tuple[str, str], _Pool] = {}
        self._said = ""

    def run(self) -> None:
        """Work until no job is left."""
        with contextlib.ExitStack() as stack:
            guard = files.open_file(self.home.path / _LOCK, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, guard)
            if not files.try_lock(guard):
                return  # another process is the queue
            stack.callback(self.close)
            while True:
                began = time.monotonic()
                try:
                    self.step()
                except (OSError, QueueError) as error:
                    if not self.home.path.is_dir():
                        raise
                    self._wait_for_room(error)
                    continue
                with self.history.transaction():
                    if not self._rows():
                        # Within the transaction: a `submit` that adds a job afterwards finds that there is no queue.
                        files.unlock(guard)
                        return
                time.sleep(max(_POLL_S, time.monotonic() - began))  # at most half of a core

    def _wait_for_room(self, error: Exception) -> None:
        """Say what cannot be written, and wait: the disk is full, say, and what runs continues."""
        if str(error) != self._said:
            self._said = str(error)
            say(f"schedule: {error}. The queue waits")
        time.sleep(_WAITS_FOR_ROOM_S)

    def close(self) -> None:
        """Stop what was started for the jobs."""
        for pool in self._pools.values():
            pool.machines.close()

    def step(self) -> None:
        """Look at all jobs once: note which have ended, start and stop."""
        if (policy := self.home.policy) != self._policy:
            for pool in self._pools.values():
                pool.scheduler = Scheduler(policy_named(policy), self._interval_s)
            self._policy = policy
        for row in self._rows():
            with self._alone(row):
                if row.node and not self._is_running(row):
                    self._note_end(row)
                elif row.state.final and not row.node:  # a command was killed before it could note that
                    note_end(self.history, row.id)
        rows = self._rows()
        for key in sorted({(row.backend, row.address) for row in rows}):
            self._serve(self._pool(*key), [row for row in rows if (row.backend, row.address) == key])

    def _rows(self) -> list[Row]:
        return [row for row in self.history.unfinished() if row.backend in SERVED]

    @contextlib.contextmanager
    def _alone(self, row: Row) -> Iterator[None]:
        """End a job whose folder cannot be used, and no other: it may have removed or replaced what is in there."""
        try:
            yield
        except OSError as error:
            if files.may_pass(error):
                raise
            folder = self.home.folder(row.id)
            kill_marked(folder.path)
            with contextlib.suppress(OSError, QueueError):
                machines = self._pool(row.backend, row.address).machines
                if row.node and machines.runs(folder, row.handle):
                    try:
                        folder.ask(State.CANCELLED)
                        return  # the process that watches it ends soon
                    except OSError:  # nothing can be asked of it
                        machines.end(folder, row.handle)
            reason = f"cannot use {error.filename or folder.path}: {error.strerror or error}"
            self._refuse(row, State.FAILED, f"schedule: {reason}")

    def _pool(self, backend: str, address: str) -> _Pool:
        if (backend, address) not in self._pools:
            scheduler = Scheduler(policy_named(self._policy), self._interval_s)
            try:
                machines = self._machines(backend, address, self.home)
            except QueueError as error:  # the jobs of other back ends run
                machines = cast("Machines", _Absent(error))
            self._pools[backend, address] = _Pool(machines, scheduler)
        return self._pools[backend, address]

    def _serve(self, pool: _Pool, rows: Sequence[Row]) -> None:
        """Decide which jobs of a pool run, ask others to make room, and start what has room."""
        nodes = pool.nodes()
        for row in rows:
            said = row.status.message
            if not row.node and said != pool.trouble and (pool.trouble or said.startswith(_WAITS)):
                self._note_trouble(row, pool.trouble)
        if not nodes:
            return
        entries = {}
        for row in rows:
            with self._alone(row):
                if row.node or self._may_start(row):
                    entry = self._entry(row)
                    against = None if row.node else pool.scheduler.refuses(entry, nodes)
                    if against is not None:
                        self._refuse(row, State.FAILED, f"schedule: {against}")
                    else:
                        entries[row.id] = entry
        places = pool.scheduler.decide([*entries.values()], nodes, time.time())
        free = dict(nodes)
        running = [row for row in rows if row.node]
        for row in running:
            free[row.node] = free.get(row.node, 0) - row.given
            folder = self.home.folder(row.id)
            if places.get(row.id) != (row.node, row.given) and folder.asked is None:
                with self._alone(row):
                    folder.ask(State.PREEMPTED)  # it holds its devices until it has saved
        for row in rows:
            node, devices = places.get(row.id, ("", 0))
            if not row.node and devices and free[node] >= devices:
                taken = [other.handle for other in running if other.node == node]
                with self._alone(row):
                    if started := self._start(pool, row, node, devices, taken):
                        running.append(started)
                        free[node] -= devices

    def _note_trouble(self, row: Row, trouble: str) -> None:
        """Let `egeria jobs ps` show why a job waits, or that this reason has passed."""
        folder = self.home.folder(row.id)
        with self._alone(row), self.history.transaction():
            status = folder.status()
            if not status.state.final:
                status.message = trouble
                folder.write_status(status)

    def _entry(self, row: Row) -> QueueEntry:
        status, service = row.status, row.status.service
        if row.node and status.started is not None:
            service += row.given * max(time.time() - status.started, 0.0)
        return QueueEntry(
            *(row.id, row.submitted, row.devices, row.most_devices, row.priority),
            place=(row.node, row.given) if row.node else None,
            service=service,
            starts=status.attempt,
            hints=self.home.folder(row.id).hints,
            run=Path(row.run),
        )

    def _is_running(self, row: Row) -> bool:
        folder, machines = self.home.folder(row.id), self._pool(row.backend, row.address).machines
        if folder.is_watched:
            return True
        try:
            if machines.runs(folder, row.handle):
                if folder.asked is State.CANCELLED:
                    machines.stop(row.handle)
                return True
        except QueueError:  # the cluster does not answer
            silent = folder.since_beat()
            if folder.asked is not State.CANCELLED and (silent is None or silent < _SILENT_S):
                return True
        return folder.is_watched  # it may have started meanwhile

    def _note_end(self, row: Row) -> None:
        folder = self.home.folder(row.id)
        with folder.watched() as free:
            if not free:
                return
            status = folder.status()
            if folder.asked is State.CANCELLED and not status.state.final:
                kill_marked(folder.path)
                self._refuse(row, State.CANCELLED, "")
                return
            if status.state in (State.RUNNING, State.LOST, State.QUEUED):  # who watched it was killed
                status.state, status.message = State.LOST, "execute: the process that watched the job was killed"
                folder.tell("schedule", status.message)
                kill_marked(folder.path)  # what it had started beside the job
                folder.settle(status, retries=0)
        if folder.status().state.final:
            note_end(self.history, row.id)
        else:
            self.history.update(row.id, node="", given=0, handle="")

    def _may_start(self, row: Row) -> bool:
        """Whether a job that waits has all that it waits for; cancels it if that cannot be any more."""
        for id in row.after:
            state = self.history.get(id).state
            if state in (State.FAILED, State.CANCELLED):
                self._refuse(row, State.CANCELLED, f"schedule: job {id}, which it comes after, is {state}")
            if state is not State.DONE:
                return False
        return True

    def _refuse(self, row: Row, state: State, message: str) -> None:
        folder = self.home.folder(row.id)
        folder.clear_way()
        status = folder.status()
        status.state, status.message, status.ended = state, message, time.time()
        folder.write_status(status)
        folder.tell("schedule", message.partition(": ")[2] or state.value)
        note_end(self.history, row.id)

    def _start(self, pool: _Pool, row: Row, node: str, devices: int, taken: Sequence[str]) -> Row | None:
        """Start a job; returns its row, or None if it has not started."""
        folder, token = self.home.folder(row.id), secrets.token_hex(8)
        handle = pool.machines.claim(folder, devices, taken)
        with self.history.transaction():
            status = folder.status()
            if status.state.final:  # cancelled meanwhile
                return None
            before = status.state
            status.state, status.started, status.ended, status.devices = State.RUNNING, time.time(), None, devices
            folder.write_status(status)
            self.history.update(row.id, node=node, given=devices, handle=handle)
        folder.give_token(token)
        try:
            pool.machines.start(folder, node, devices, handle, token)
        except QueueError as error:  # the cluster has gone, or is about to
            say(f"schedule: job {row.id}: {error}")
            status.state = before
            folder.write_status(status)
            self.history.update(row.id, node="", given=0, handle="")
            return None
        except (OSError, ExecutionError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._refuse(row, State.FAILED, f"schedule: cannot start a process: {reason}")
            return None
        return self.history.get(row.id)


def ensure_queue(home: Home) -> None:
    """Start the queue of a home in the background, unless it runs.

    Raises:
        QueueError: it does not start.
    """
    if queue_runs(home):
        return
    log_path = home.path / _LOG
    command = [sys.executable, "-P", "-m", "lightning_egeria.jobs.queue", str(home.path)]
    with files.adding(log_path) as log:
        process = detached(command, inherited(), log)
    # It outlives this process, which must not wait for it.
    _QUEUES[:] = [queue for queue in _QUEUES if queue.poll() is None] + [process]
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None and not queue_runs(home):
        time.sleep(0.02)
    if process.returncode not in (None, 0):
        text = files.read_text(log_path, _LARGEST_LOG, links=False, errors="replace")
        last = text.strip().rpartition("\n")[2]
        raise QueueError(f"the queue does not start: {last}")


def queue_runs(home: Home) -> bool:
    """Whether the queue of a home runs on this machine."""
    with files.held(home.path / _LOCK) as free:
        return not free


def main(path: str) -> int:
    """Be the queue of a home until no job is left."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        home = Home(Path(path))
        with home.history() as history:
            Queue(home, history).run()
    except (JobError, ExecutionError) as error:
        print(f"{error.layer}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
