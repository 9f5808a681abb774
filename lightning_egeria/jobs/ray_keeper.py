"""Keeps a Ray on this machine until the pipe on standard input is closed: its starter has ended, however that ended."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from pathlib import Path

from lightning_egeria.core.programs.processes import ProgramProcess

_GRACE_S = 20.0
_POLL_S = 0.5


def main(folder: str, log: str, *options: str) -> int:
    """Run ``ray start --block``; what it has started and its folder go when this process ends.

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
        finally:
            status = process.stop(_GRACE_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return abs(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
