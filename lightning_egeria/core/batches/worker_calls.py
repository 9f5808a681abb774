"""Calls into the worker processes of a DataLoader, between two of the batches that they load."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from lightning_egeria.errors import WorkerError

_numbers = itertools.count()
_function: Callable[..., Any] | None = None  # what a call runs in this process
_here: Worker | None = None


class Worker(NamedTuple):
    """A worker process.

    Attributes:
        number: of the queue that it reads.
        pid: of the process.
    """

    number: int
    pid: int


class CallableWorkers(BaseContext):
    """The ``multiprocessing_context`` of a DataLoader whose workers can be called.

    A call runs in the main thread of a worker, behind the batches that it was asked for before. So it sees what these
    saw: number and seed of the worker, what ``worker_init_fn`` has opened, and the dataset as this process has it. The
    ``worker_init_fn`` says by `answer_calls` what a call runs.

    Args:
        base: the context that the user chose; None for the default one.
    """

    def __init__(self, base: BaseContext | None) -> None:
        self._chosen = cast(Any, base if base is not None else multiprocessing.get_context())
        self.Process = self._chosen.Process
        self._owner = os.getpid()
        self._queues: dict[int, _Queue] = {}

    def get_context(self, method: str | None = None) -> Any:
        """Return the context that the user chose, or that of a method."""
        return self._chosen.get_context(method)

    def Queue(self, maxsize: int = 0) -> _Queue:  # noqa: N802  # as DataLoader calls it
        """Return a queue for one worker."""
        found = _Queue(next(_numbers), self._chosen)
        self._queues[found.number] = found
        return found

    def has(self, worker: Worker | None) -> bool:
        """Whether it is a worker of this loader that can be called from this process."""
        if worker is None or worker.number not in self._queues or os.getpid() != self._owner:
            return False
        return any(child.pid == worker.pid for child in multiprocessing.active_children())

    def call(self, worker: Worker, *arguments: Any) -> Any:
        """Call a worker, and wait for the answer.

        Raises:
            WorkerError: it ends before it answers.
            Exception: what the call raised.
        """
        queue = self._queues[worker.number]
        number = queue.send(arguments)
        while (answered := queue.answer(number)) is None:
            if not self.has(worker):
                raise WorkerError(
                    f"DataLoader worker {worker.pid} ended while it loaded samples of a cached batch. Its own message "
                    "may say why: too little memory, say"
                )
        if isinstance(answered.result, ExceptionWrapper):
            answered.result.reraise()
        return answered.result


def answer_calls(function: Callable[..., Any]) -> None:
    """Have the calls into this worker process run a function."""
    global _function
    _function = function


def this_worker() -> Worker | None:
    """Return the worker that this process is; None if it cannot be called."""
    return _here if get_worker_info() is not None else None


class _Call(NamedTuple):
    number: int
    arguments: tuple[Any, ...]


class _Answer(NamedTuple):
    number: int
    result: Any


class _Queue(Queue):  # type: ignore[type-arg]  # no generic class before Python 3.12
    """The indices that a worker gets, and calls between them."""

    def __init__(self, number: int, context: Any) -> None:
        super().__init__(ctx=context)
        self.number = number
        self._calls = itertools.count()
        self._answers, self._caller = context.Pipe(duplex=False)

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.number, self._caller

    def __setstate__(self, state: Any) -> None:
        own, self.number, self._caller = state
        super().__setstate__(own)

    def send(self, arguments: tuple[Any, ...]) -> int:
        """Call the worker that reads the queue; return the number of the call."""
        number = next(self._calls)
        self.put(_Call(number, arguments))
        return number

    def answer(self, number: int) -> _Answer | None:
        """Return the answer to a call; None if there is none within a second."""
        while self._answers.poll(1.0):
            answer: _Answer = self._answers.recv()
            if answer.number == number:  # not to an earlier one that was interrupted
                return answer
        return None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return what is next for the worker; answer calls in front of it."""
        global _here
        _here = Worker(self.number, os.getpid())
        while isinstance(item := super().get(block, timeout), _Call):
            self._answer(item)
        return item

    def _answer(self, call: _Call) -> None:
        try:
            assert _function is not None  # set at the start of the worker
            result = _function(*call.arguments)
        except Exception:  # of the user's dataset; it is raised where the call was made
            result = ExceptionWrapper(where=f"in DataLoader worker process {os.getpid()}")
        self._caller.send(_Answer(call.number, result))
