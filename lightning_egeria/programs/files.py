"""Reading files that a job has written, and replacing files that others read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_at_most(path: Path, most: int) -> bytes:
    """Return the content of a file. A pipe or a device in its place could hold up the reader for ever.

    Raises:
        OSError: it cannot be read, is no ordinary file, or is larger than ``most`` bytes.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no ordinary file")
        if status.st_size > most:
            raise OSError(f"{path} is larger than {most} bytes")
        return opened.read(status.st_size)  # so much memory is taken before anything is read


def write_whole(path: Path, text: str) -> None:
    """Replace a file: a reader sees the whole old or new one, and a full disk leaves the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
