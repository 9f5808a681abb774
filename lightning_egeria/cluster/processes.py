"""The process of a job: started in a group of its own, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_egeria.errors import JobError

LOCK = "lock"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class JobProcess:
    """A running command with its own process group, whose output goes to a file.

    Args:
        arguments: program and arguments; no shell reads them.
        log: file that its output is added to.
        environment: its environment variables.

    Raises:
        JobError: the program cannot be started.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.arguments = list(arguments)
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    self.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    preexec_fn=_ends_with_parent(),
                )
            except (OSError, ValueError) as error:
                raise JobError(f"the command {self.arguments[0]!r} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Process id, also that of its group."""
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Wait at most some seconds; return the exit status, or None if the process still runs."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._signal(signal.SIGKILL)  # ranks that a killed process has left
        return status

    def stop(self, grace_s: float) -> int:
        """Ask the process to end, kill its group if it has not after some seconds, and return the exit status."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        status = self.wait(max(deadline - time.monotonic(), 0))
        if status is None:
            self._signal(signal.SIGKILL)
            status = self._process.wait()
        return status

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the second of a group of zombies
            os.killpg(self._process.pid, number)


def _ends_with_parent() -> Callable[[], None] | None:
    """Have Linux end the child when this process dies, however it dies; elsewhere it may stay."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have a folder of jobs for this run alone.

    Raises:
        JobError: another run has it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise JobError(f"another run has the jobs in {folder}. Wait for it, or name another folder") from error
        yield
