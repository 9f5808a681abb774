"""Two threads beside training: one reads entries ahead, one writes new ones."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

READ_AHEAD_BATCHES = 3
MAX_WAITING_BYTES = 64 * 2**20


class ReadAhead:
    """Runs read jobs in order, at most `READ_AHEAD_BATCHES` further than the batch that was used last."""

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[int, Callable[[], Any], Future[Any]]] = collections.deque()
        self._used = -1
        self._busy = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, number: int, job: Callable[[], Any]) -> Future[Any]:
        """Have ``job`` done for batch ``number``; numbers rise."""
        future: Future[Any] = Future()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="egeria-cache-read", daemon=True)
                self._thread.start()
            self._jobs.append((number, job, future))
            self._changed.notify_all()
        return future

    def used(self, number: int) -> None:
        """Batch ``number`` is wanted now, or over: jobs for those before it are not."""
        if not self._jobs:  # only the caller adds some
            self._used = max(self._used, number)
            return
        with self._changed:
            self._used = max(self._used, number)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Forget the jobs that were not begun, and wait for the one that was."""
        with self._changed:
            while self._jobs:
                self._jobs.popleft()[2].cancel()
            self._changed.wait_for(lambda: not self._busy)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cancel()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._ready)
                if self._closed:
                    return
                _, job, future = self._jobs.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self._busy = True
            try:
                future.set_result(job())
            except BaseException as error:  # told where the batch is used
                future.set_exception(error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _ready(self) -> bool:
        return self._closed or (bool(self._jobs) and self._jobs[0][0] <= self._used + READ_AHEAD_BATCHES)


@dataclasses.dataclass
class _Writing:
    job: Callable[[], None]
    size: int


class WriteBehind:
    """Runs write jobs in order; takes no more than `MAX_WAITING_BYTES` of them at a time."""

    def __init__(self) -> None:
        self._jobs: collections.deque[_Writing] = collections.deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], size: int) -> bool:
        """Have ``job`` write ``size`` bytes; False if too much is waiting already. It must not raise."""
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="egeria-cache-write", daemon=True)
                self._thread.start()
            self._jobs.append(_Writing(job, size))
            self._waiting_bytes += size
            self._changed.notify_all()
            return True

    def finish(self) -> None:
        """Wait until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> None:
        """Write what is waiting and end the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._jobs))
                if not self._jobs:
                    return
                writing = self._jobs.popleft()
                self._busy = True
            try:
                writing.job()
            finally:
                with self._changed:
                    self._busy = False
                    self._waiting_bytes -= writing.size
                    self._changed.notify_all()
