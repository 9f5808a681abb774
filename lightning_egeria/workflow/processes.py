"""Processes of a job: they end with the process that watches them, and none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MARK = "EGERIA_JOB_FOLDER"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def start(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in one pipe that does not block.

    On Linux it is killed when this process is, however that ends. It ignores SIGUSR2: Slurm sends that to all processes
    of a job, and only the one that watches it knows what to do.

    Raises:
        OSError: the command does not exist, say.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_before_it_runs(),
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_marked(folder: Path) -> int:
    """Kill what an earlier attempt of a job has left, wherever it is on this machine; return how many processes.

    Each process of a job has its folder in its environment. Only Linux shows that.
    """
    killed = 0
    wanted = f"{MARK}={folder}".encode(errors="surrogateescape")
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if int(place.name) != os.getpid() and wanted in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
                killed += 1
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return killed


def _before_it_runs() -> Callable[[], None]:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def prepare() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    return prepare
