"""Ray for live jobs: started on this machine if need be, and quiet."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from lightning_egeria.errors import JobError
from lightning_egeria.programs.files import held
from lightning_egeria.programs.processes import kill_marked

CONNECT_S, STARTS = 5.0, 3
LOOK_S, LOOKS = 1.0, 3  # Ray is lost if it was not there so often
LOST = 2  # exit status
TEMPORARY, PREFIX, LOCK = Path("/tmp"), "ray-egeria-", "egeria.lock"  # Ray's sockets need a short path
MARK = "EGERIA_RAY_FOLDER"  # in the environment of all processes of a Ray that was started here
_QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextlib.contextmanager
def started(address: str | None, end_jobs: Callable[[], None]) -> Iterator[None]:
    """Ray, started on this machine unless it runs already.

    Where Ray is lost meanwhile, this process ends with a message and status 2: Ray itself would wait for ever, or end
    the process after a minute.

    Args:
        address: of a Ray cluster, or ``"auto"``; None starts Ray here.
        end_jobs: ends what Ray has started, before the process ends.

    Raises:
        JobError: Ray does not start or answer.
    """
    if ray.is_initialized():
        with _watched(end_jobs):
            yield
        return
    with contextlib.ExitStack() as stack:
        if address is None:
            temporary = stack.enter_context(temporary_folder())
            _start_here(temporary)
        else:
            temporary = None
            _connect(address)
        stack.callback(_shut_down)

        def end() -> None:
            end_jobs()
            if temporary is not None:
                _remove(temporary)

        with _watched(end), _sigterm_as_interrupt():
            yield


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of Ray. What runs that were killed have left is removed."""
    for folder in TEMPORARY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with held(folder / LOCK) as free:
                    if free:
                        _remove(folder)
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=TEMPORARY))
    with held(hidden / LOCK):
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))  # only now can others see it
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder of a Ray, and end the processes of it that still run."""
    deadline = time.monotonic() + CONNECT_S
    while kill_marked(folder, MARK) and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _shut_down() -> None:
    with _uninterrupted():
        ray.shutdown()


def _start_here(temporary: Path) -> None:
    """Start Ray. On a busy machine it may take longer than Ray waits for itself, so it is tried again."""
    os.environ[MARK] = str(temporary)
    try:
        for attempt in range(STARTS):
            try:
                ray.init(_temp_dir=str(temporary), include_dashboard=False, **_QUIETLY)
                return
            except Exception as error:  # a bare one if it takes too long
                kill_marked(temporary, MARK)  # Ray forgets its processes
                if attempt == STARTS - 1:
                    raise JobError(f"Ray does not start on this machine: {error}") from error
    finally:
        del os.environ[MARK]


def _connect(address: str) -> None:
    _check_reachable(address)
    try:
        ray.init(address=address, **_QUIETLY)
    except ConnectionError as error:
        raise JobError(f"no Ray cluster answers at {address}: {error}") from error


def _check_reachable(address: str) -> None:
    """Refuse an address where nobody listens, which Ray would call for minutes."""
    place = address.rpartition("://")[2]
    _, colon, port = place.rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto", and what Ray itself refuses
    error = _error_of_calling(place)
    if error is not None:
        raise JobError(f"no Ray cluster answers at {address}: {error}") from error


@contextlib.contextmanager
def _watched(end: Callable[[], None]) -> Iterator[None]:
    """End this process once the head of the cluster takes no connections, or Ray has ended on this machine."""
    context = ray.get_runtime_context()
    head, here = context.gcs_address, context.get_node_id()

    def has_left() -> bool:
        try:
            return not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == here)
        except Exception:  # the head has ended meanwhile, and Ray has a class of its own for each way
            return False

    # Ray asks the head for its nodes, and waits a minute for a head that has ended: a thread each.
    looks: dict[str, Callable[[], bool]] = {
        f"its head at {head} does not answer": lambda: refuses(head),
        "it does not run on this machine any more": has_left,
    }
    over = threading.Event()

    def watch(message: str, is_lost: Callable[[], bool]) -> None:
        times = 0
        while times < LOOKS:
            if over.wait(LOOK_S):
                return
            times = times + 1 if is_lost() else 0
        _end_process(message, end)

    threads = [threading.Thread(target=watch, args=look, name="egeria-ray", daemon=True) for look in looks.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:  # Ray would start again if it was asked for its nodes after its end
            thread.join()


def refuses(address: str) -> bool:
    """Whether nobody listens. A machine that is too busy to answer does not count."""
    return isinstance(_error_of_calling(address), ConnectionRefusedError)


def _error_of_calling(address: str) -> Exception | None:
    """What hinders a connection to ``HOST:PORT``; None if somebody listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def _end_process(lost: str, end: Callable[[], None]) -> None:
    try:
        end()
    finally:
        message = f"egeria-cluster: Ray has ended: {lost}. The jobs were stopped; the same command goes on"
        print(message, file=sys.stderr, flush=True)
        os._exit(LOST)


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
