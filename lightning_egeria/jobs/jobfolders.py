"""The folder of a job: what was submitted, its state, its heart-beat, its log, and what it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs import files
from lightning_egeria.errors import ExecutionError, QueueError
from lightning_egeria.jobs.rundirs import check_owned

MOST_STALLS = 3
_LARGEST = 2**20  # of each of the files beside the log
_MOST = 2**53  # attempts, and nanoseconds of a checkpoint are below 2**63


class State(enum.StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"  # has saved, and waits to resume
    LOST = "lost"  # was killed, and waits to resume

    @property
    def final(self) -> bool:
        """Whether nothing happens any more."""
        return self in (State.DONE, State.FAILED, State.CANCELLED)


@dataclasses.dataclass
class Status:
    """What the process that watches a job writes.

    Attributes:
        state: of the job.
        attempt: number of starts so far.
        failures: attempts that failed.
        stalls: attempts in a row that were stopped or lost without a new checkpoint.
        progress: `JobFolder.progress` when the latest attempt began.
        started: of the latest attempt, in seconds since 1970.
        ended: of the latest attempt.
        message: what went wrong, with its layer.
        host: machine of the latest attempt.
        devices: that the latest attempt has or had.
        service: device-seconds of the attempts that have ended.
    """

    state: State = State.QUEUED
    attempt: int = 0
    failures: int = 0
    stalls: int = 0
    progress: int = 0
    started: float | None = None
    ended: float | None = None
    message: str = ""
    host: str = ""
    devices: int = 0
    service: float = 0.0


@dataclasses.dataclass(frozen=True)
class Submission:
    """What was handed over.

    Attributes:
        id: of the job.
        name: of the job.
        run: path of the run directory.
        origin: folder of the description; relative data paths start there.
        backend: ``"local"``, ``"slurm"`` or ``"ray"``.
        python: of the process that submitted it, whose packages the lock lists.
    """

    id: int
    name: str
    run: str
    origin: str
    backend: str
    python: str = sys.executable


class JobFolder:
    """The folder of one job.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.redact: Callable[[str], str] = str  # takes the secrets out of what is added to the log
        self.log, self.work, self.results = path / "log", path / "work", path / "results"
        self.checkpoints, self.data = path / "checkpoints", path / "data"
        self.hints = path / "hints.json"
        self._status, self._beat, self._asked = path / "status.json", path / "heartbeat", path / "asked"
        self._lock = path / "lock"

    @classmethod
    def create(cls, path: Path, submission: Submission) -> JobFolder:
        """Make the folder of a new job.

        Raises:
            QueueError: it cannot be written.
        """
        folder = cls(path)
        try:
            for part in (path, folder.work, folder.results, folder.checkpoints):
                part.mkdir(mode=0o700, parents=True)
            _write(path / "submission.json", json.dumps(dataclasses.asdict(submission)))
            files.touch(folder.log)
        except OSError as error:
            raise QueueError(f"cannot write the folder {path}: {error.strerror or error}") from error
        return folder

    def submission(self) -> Submission:
        """Return what was handed over.

        Raises:
            ExecutionError: the folder is no job, or others could have written to it.
        """
        try:
            check_owned(self.path)
            submission = Submission(**files.read_json(self.path / "submission.json", _LARGEST, links=False))
            texts = (submission.name, submission.run, submission.origin, submission.backend, submission.python)
            if type(submission.id) is not int or not all(type(text) is str and "\0" not in text for text in texts):
                raise TypeError("expected an id and texts")
        except (OSError, ValueError, TypeError) as error:
            raise ExecutionError(f"{self.path}: no folder of a job: {error}") from error
        return submission

    def status(self) -> Status:
        """Return the latest status; if there is none, that of a job that has not started."""
        try:
            return _status(files.read_json(self._status, _LARGEST, links=False))
        except FileNotFoundError:
            return Status()
        except (ValueError, TypeError, KeyError):  # the machine lost its power, say
            return Status(State.LOST, message="the status file is damaged")
        except OSError as error:
            if files.may_pass(error):
                return Status(State.LOST, message="the status file cannot be read")
            # No accident: the job has put something else there, and would do so again.
            return Status(State.FAILED, message=f"schedule: cannot read {self._status}: {error.strerror or error}")

    def clear_way(self) -> None:
        """Give another name to what the job has put in the place of its folder, status, log or lock.

        Raises:
            OSError: the disk is full, or the folder of all jobs cannot be written to.
        """
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            files.set_aside(self.path)
        self.path.mkdir(mode=0o700, exist_ok=True)
        for part in (self._status, self.log, self._lock):
            if part.is_symlink() or (part.exists() and not part.is_file()):
                files.set_aside(part)

    def write_status(self, status: Status) -> None:
        """Replace the status. A reader sees the whole old or new one."""
        _write(self._status, json.dumps(dataclasses.asdict(status)))

    def settle(self, status: Status, retries: int, stopping: bool = False) -> None:
        """Decide whether an attempt that has ended is the last one, and write the status.

        A failure is retried as often as the description says. What was stopped or killed resumes, unless this happens
        `MOST_STALLS` times in a row without a new checkpoint. Stops that the queue has asked for do not count: new jobs
        may arrive faster than this one saves.

        Args:
            status: its state says how the attempt ended; changed to where the job is now.
            retries: of the description.
            stopping: whether the process that watches the job has to end.
        """
        status.ended = time.time()
        if status.started is not None:
            status.service += status.devices * max(status.ended - status.started, 0.0)
        if status.state is State.FAILED:
            status.failures += 1
            if status.failures <= retries and not stopping:
                status.state = State.QUEUED
        elif status.state in (State.PREEMPTED, State.LOST):
            counts = status.state is State.LOST or self.asked is not State.PREEMPTED
            status.stalls = 0 if self.progress() != status.progress else status.stalls + counts
            if status.stalls >= MOST_STALLS:
                status.state = State.FAILED
                status.message = f"execute: stopped {status.stalls} times in a row without a new checkpoint"
            elif status.state is State.LOST:
                status.state = State.PREEMPTED if stopping else State.QUEUED
        self.write_status(status)

    def beat(self) -> None:
        """Say that the job is watched."""
        files.touch(self._beat)

    def since_beat(self) -> float | None:
        """Return the seconds since the last heart-beat; None before the first."""
        with contextlib.suppress(OSError):
            return max(time.time() - self._beat.lstat().st_mtime, 0.0)
        return None

    def ask(self, state: State) -> None:
        """Ask the process that watches the job to end it, so that it is cancelled or preempted."""
        _write(self._asked, state.value)

    @property
    def asked(self) -> State | None:
        """How the job was asked to end; None if it was not."""
        with contextlib.suppress(OSError, ValueError):  # there is none; or the machine lost its power, say
            return State(files.read_text(self._asked, _LARGEST, links=False))
        return None

    def forget_asked(self) -> None:
        """Forget that somebody has asked the job to end."""
        self._asked.unlink(missing_ok=True)

    def revive(self) -> None:
        """Let a job that has ended resume from its last checkpoint."""
        self.forget_asked()
        status = self.status()
        self.write_status(Status(State.QUEUED, attempt=status.attempt, service=status.service))

    def tell(self, layer: str, text: str) -> None:
        """Add lines to the log, with the time and the layer that speaks."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} [{layer}] {line}\n" for line in self.redact(text).splitlines())
        with files.adding(self.log) as log:
            log.write(lines.encode(errors="replace"))

    def progress(self) -> int:
        """Return a number that changes whenever a checkpoint is written; 0 without one."""
        times = [0]
        with contextlib.suppress(OSError):  # the job may remove its checkpoints, and the folder
            times += [path.stat().st_mtime_ns for path in self.checkpoints.iterdir() if path.is_file()]
        return max(times)

    def give_token(self, token: str) -> None:
        """Let only the process with this token start the job from now on."""
        _write(self.path / "token", token)

    def token(self) -> str:
        """Return the latest token; empty without one."""
        with contextlib.suppress(FileNotFoundError):
            return files.read_text(self.path / "token", _LARGEST, links=False, errors="replace")
        return ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[bool]:
        """Hold the job: True for the one process that has it, False while another has. Ends with the process."""
        with files.held(self._lock) as free:
            yield free

    @property
    def is_watched(self) -> bool:
        """Whether a process holds the job now."""
        with self.watched() as free:
            return not free


def _write(path: Path, text: str) -> None:
    files.write_whole(path, text, files.PRIVATE)


def _status(content: dict[str, Any]) -> Status:
    """Return a status from plain values.

    Raises:
        ValueError, TypeError, KeyError: they are none.
    """
    status = Status(**{**content, "state": State(content["state"])})
    for count in (status.attempt, status.failures, status.stalls, status.devices):
        if type(count) is not int or not 0 <= count < _MOST:
            raise ValueError(f"expected a count, got {count!r:.40}")
    if type(status.progress) is not int or not 0 <= status.progress < 2**63:
        raise ValueError(f"expected the time of a checkpoint, got {status.progress!r:.40}")
    for moment in (status.started, status.ended, status.service):
        if moment is not None and (
            type(moment) not in (int, float) or not math.isfinite(moment) or abs(moment) > _MOST
        ):
            raise ValueError(f"expected a time, got {moment!r:.40}")
    if content.get("service", 0.0) is None or status.service < 0:
        raise ValueError(f"expected device-seconds, got {status.service!r:.40}")
    for text in (status.message, status.host):
        if type(text) is not str:
            raise TypeError(f"expected a text, got {text!r:.40}")
        text.encode()  # a database takes no other
    return status
