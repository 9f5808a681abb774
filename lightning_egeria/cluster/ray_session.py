"""Ray for live jobs: started on this machine if need be, and quiet."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator

import ray


@contextlib.contextmanager
def started(address: str | None) -> Iterator[None]:
    """Ray, started on this machine unless it runs already."""
    if ray.is_initialized():
        yield
        return
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        local = {"include_dashboard": False, "_temp_dir": temporary} if address is None else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        try:
            yield
        finally:
            with _uninterrupted():
                ray.shutdown()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Have Ray Tune print and write nothing of its own, which knows trials and no jobs."""
    logger, before = logging.getLogger("ray.tune"), dict(os.environ)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # failures of jobs have a line each, and their own logs
    os.environ |= {
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        # A trial gives the group of its job time to end; Ray would kill it first.
        "RAY_kill_child_processes_on_worker_exit": "false",
    }
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, so that nothing is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
