"""Keeps a Ray on this machine until the pipe on standard input is closed: its starter has ended, however that ended."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from lightning_egeria.core.programs.processes import ProgramProcess, marked

_GRACE_S = 20.0
_POLL_S = 0.5
_WATCHER = "lightning_egeria.jobs.execution"


def main(folder: str, log: str, *options: str) -> int:
    """Run ``ray start --block``. When the pipe is closed, its jobs save, and then it ends with all that it has started.

    Args:
        folder: for its sockets and logs; removed.
        log: file that its output is added to.
        options: of ``ray start``.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"]
    try:
        process = ProgramProcess([*command, *options], Path(folder), os.environ, log=Path(log))
        try:
            while process.poll() is None and not select.select([sys.stdin], [], [], _POLL_S)[0]:
                pass
            asked: set[int] = set()
            while process.poll() is None and (watchers := _watchers(folder)):
                for watcher in watchers - asked:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(watcher, signal.SIGTERM)
                asked |= watchers
                time.sleep(_POLL_S)  # it kills its job after the grace period of the job
        finally:
            status = process.stop(_GRACE_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return abs(status)


def _watchers(folder: str) -> set[int]:
    """Return the processes that watch the jobs of this Ray."""
    return {process for process, arguments in marked(Path(folder)) if _WATCHER in arguments}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
