"""Ray for live jobs: started on this machine if need be, and quiet."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from lightning_egeria.errors import JobError

CONNECT_S, STARTS = 5.0, 3
_QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextlib.contextmanager
def started(address: str | None) -> Iterator[None]:
    """Ray, started on this machine unless it runs already."""
    if ray.is_initialized():
        yield
        return
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        if address is None:
            _start_here(temporary)
        else:
            _connect(address)
        try:
            with _sigterm_as_interrupt():
                yield
        finally:
            with _uninterrupted():
                ray.shutdown()


def _start_here(temporary: str) -> None:
    """Start Ray. On a busy machine it may take longer than Ray waits for itself, so it is tried again."""
    for attempt in range(STARTS):
        before = _children()
        try:
            ray.init(_temp_dir=temporary, include_dashboard=False, **_QUIETLY)
            return
        except Exception as error:  # a bare one if it takes too long
            for process in _children() - before:  # Ray forgets them
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
            if attempt == STARTS - 1:
                raise JobError(f"Ray does not start on this machine: {error}") from error


def _children() -> set[int]:
    """Process ids of the children of this process; none where the system does not tell."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def _connect(address: str) -> None:
    _check_reachable(address)
    try:
        ray.init(address=address, **_QUIETLY)
    except ConnectionError as error:
        raise JobError(f"no Ray cluster answers at {address}: {error}") from error


def _check_reachable(address: str) -> None:
    """Refuse an address where nobody listens, which Ray would call for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto", and what Ray itself refuses
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise JobError(f"no Ray cluster answers at {address}: {error}") from error


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
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the jobs as Ctrl-C does. Ray would end at once, and print a trace of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
