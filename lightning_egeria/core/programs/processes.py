"""Processes of jobs: they end with the process that watches them, and none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_egeria.core.programs import files
from lightning_egeria.errors import ProgramError

MARK = "EGERIA_JOB_FOLDER"
PREEMPTED = 75  # exit status of a program that has saved and is to be continued later: EX_TEMPFAIL of sysexits.h
CHECKPOINT = "last.ckpt"  # of an experiment, in the job's folder of checkpoints
_POLL_S = 0.05
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class ProgramProcess:
    """A running program, in a session of its own with all that it starts.

    On Linux it is killed when this process ends, however that ends. It ignores SIGUSR2: Slurm sends that to all
    processes of a job, and only the one that watches it knows what to do.

    Args:
        arguments: program and arguments; no shell reads them.
        folder: of the job; each of its processes has it in its environment.
        environment: variables.
        work: folder that it runs in; None for that of this process.
        log: file that its output is added to; None leaves it in `output`.

    Attributes:
        returncode: exit status, minus the number of the signal that ended it; None while it runs.

    Raises:
        ProgramError: the program cannot be started.
        OSError: the log cannot be written, or is a link.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        work: Path | None = None,
        log: Path | None = None,
    ) -> None:
        self.folder = folder
        self.returncode: int | None = None
        self._asked: int | None = None  # signal that shall end it
        self._passed_on = False
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(files.adding(log)) if log is not None else subprocess.PIPE
            try:
                self._process = subprocess.Popen(
                    list(arguments),
                    cwd=work,
                    env={**environment, MARK: str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_before_it_runs(),
                )
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise ProgramError(f"the command {arguments[0]!r} cannot be started: {reason}") from error
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id, also that of its group."""
        return self._process.pid

    @property
    def output(self) -> int:
        """File descriptor of what it prints, without a log. Reading does not block."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def poll(self) -> int | None:
        """Return the exit status; None while the program runs, or what it has started saves after `ask_to_end`."""
        status = self._process.poll()
        if status is None or self.returncode is not None:
            return self.returncode
        if self._asked is not None and status == -self._asked and self._group_lives():
            # A shell ends at once, and does not tell the program that it has started.
            if not self._passed_on:
                self._passed_on = True
                self._signal_group(self._asked)
            return None
        self.kill()  # ranks that a killed program has left, for example
        self.returncode = status
        return status

    def wait(self, seconds: float) -> int | None:
        """Wait at most some seconds; return as `poll`."""
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None and (left := deadline - time.monotonic()) > 0:
            try:
                self._process.wait(min(left, 1.0))
            except subprocess.TimeoutExpired:
                continue
            if self._asked is not None:
                time.sleep(min(left, _POLL_S))
        return status

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the program alone: loading workers that die of it would disturb its last checkpoint.

        A program that does not handle the signal, such as a shell, leaves it to those that it has started.
        """
        self._asked = number
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the program and all that it has started."""
        self._asked = None
        self._signal_group(signal.SIGKILL)
        kill_marked(self.folder)

    def stop(self, grace_s: float) -> int:
        """Ask the program to end, kill it if it has not after some seconds, and return the exit status."""
        self.ask_to_end()
        status = self.wait(grace_s)
        if status is None:
            self.kill()
            self._process.wait()
            status = self.poll()
        self.close()
        assert status is not None
        return status

    def close(self) -> None:
        """Close the pipe of its output. Safe to call twice."""
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):  # macOS says the second of a group of zombies
            return False
        return True

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def marked(folder: Path, mark: str = MARK) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of a job, wherever they are on this machine: their ids and arguments.

    Each process of a job has its folder in its environment, as the variable ``mark``. Only Linux shows that.
    """
    wanted = f"{mark}={folder}".encode(errors="surrogateescape")
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if int(place.name) != os.getpid() and wanted in (place / "environ").read_bytes().split(b"\0"):
                arguments = (place / "cmdline").read_bytes().decode(errors="surrogateescape")
                yield int(place.name), arguments.split("\0")
        except OSError:  # it has ended, or belongs to another user
            continue


def kill_marked(folder: Path, mark: str = MARK) -> int:
    """Kill the processes that are `marked`; return how many there were."""
    killed = 0
    for process, _ in marked(folder, mark):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed


def _before_it_runs() -> Callable[[], None]:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def prepare() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    return prepare
