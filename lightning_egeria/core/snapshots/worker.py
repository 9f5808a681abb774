"""An object that lives in a separate process.

The process starts from a new interpreter, without forking and without the user's main module. A script needs no
``if __name__ == "__main__"``, and the process inherits no lock and no CUDA context. The two processes talk over the
worker's standard input and output, which no other process can open. The worker ends when its input closes, and so
whenever its owner ends.

Process pools of the standard library and of torch were not taken: they fork, or import the user's main module, which
breaks notebooks and scripts without a main guard. Their queues pickle tensors under the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_egeria.core.snapshots.framing import read_part, write_parts
from lightning_egeria.core.snapshots.packing import PackedObject, pack, unpack
from lightning_egeria.errors import WorkerError

NICENESS = 10  # of 19: with every core taken, a worker gets about a tenth of one


class Worker:
    """A process that holds one object and runs the calls of it in order.

    Args:
        make: called without arguments in the process; returns the object.
        threads: number of intra-op threads of torch in the process.

    Attributes:
        ended: whether `kill` was called, or a call failed because the process had ended.

    Raises:
        Exception: if ``make`` cannot be pickled.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]], threads: int = 1) -> None:
        folders = [entry for entry in sys.path if isinstance(entry, str)]  # type: ignore[redundant-expr]  # not all are
        program = f"import sys; sys.path[:] = {folders!r}; from {__name__} import serve; serve()"
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
        first = pack((make, threads), for_process=True)
        self._process = subprocess.Popen(
            # With the options of this interpreter: after -I, say, no module of PYTHONPATH may run there either.
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **hidden},
        )
        self._messages: queue.SimpleQueue[tuple[tuple[PackedObject, ...], Future[Any]] | None] = queue.SimpleQueue()
        self._newest: Future[Any] | None = None
        self.ended = False
        self._reason = ""
        # A daemon thread; otherwise an interpreter that ends without `close` would wait for the worker.
        self._thread = threading.Thread(target=self._talk, args=(first,), name="egeria-worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether every call so far has its answer."""
        return self._newest is None or self._newest.done()

    def call(self, *arguments: PackedObject) -> Future[Any]:
        """Call the object in the process; returns at once.

        Args:
            arguments: arguments packed for another process, in host memory.

        Returns:
            Future of the result. Its exception is a `WorkerError` if the object raised, or the process ended.
        """
        answer: Future[Any] = Future()
        self._newest = answer
        self._messages.put((arguments, answer))
        return answer

    def kill(self, reason: str) -> None:
        """End the process; calls without an answer fail with ``reason``."""
        self._reason, self.ended = reason, True
        self._process.kill()

    def close(self) -> None:
        """End the process at once. Calls without an answer fail with `WorkerError`. Safe to call twice."""
        self._process.kill()
        self._messages.put(None)
        self._thread.join()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unflushed bytes have no reader any more
                    stream.close()

    def _talk(self, first: PackedObject) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # for the type checker: both are pipes
        assert stdout is not None
        with contextlib.suppress(OSError):
            _send(stdin, first)
        while (message := self._messages.get()) is not None:
            arguments, answer = message
            try:
                for packed in arguments:
                    packed.wait()
                _send(stdin, *arguments)
                succeeded, value = pickle.loads(read_part(stdout))
            except (OSError, EOFError):
                self.ended = True
                status = self._process.wait()
                succeeded, value = False, self._reason or f"the reference process ended with exit status {status}"
            except Exception as error:  # after half a message, the process could not read the next
                self._process.kill()
                self.ended = True
                succeeded, value = False, f"{type(error).__name__}: {error}"
            if succeeded:
                answer.set_result(value)
            else:
                answer.set_exception(WorkerError(value))


def serve() -> None:
    """Run the process: make the object, then call it for each request."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the user's modules may print; that must not end up between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the owner decides
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arrived: queue.SimpleQueue[list[PackedObject]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, arrived), daemon=True).start()
    try:
        make, threads = unpack(arrived.get()[0])
        torch.set_num_threads(threads)
        target = make()
    except Exception as error:  # a module that cannot be imported here may raise anything
        target = functools.partial(_fail, error)
    with contextlib.suppress(AttributeError, OSError):
        os.nice(NICENESS)  # from now on: with every core taken, imports alone would take half a minute
    while True:
        arguments = arrived.get()
        try:
            reply = pickle.dumps((True, target(*map(unpack, arguments))))
        except Exception as error:  # the user's modules may raise anything
            reply = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        write_parts(answers, [reply])


def _fail(error: Exception, *_: Any) -> None:
    raise error


def _read(requests: BinaryIO, arrived: queue.SimpleQueue[list[PackedObject]]) -> None:
    """Read requests as they come, and end the process as soon as the owner is gone."""
    try:
        while True:
            arrived.put(_receive_objects(requests))
    except (OSError, EOFError):
        os._exit(0)


def _send(stream: Any, *objects: PackedObject) -> None:
    described = [[(tensor.dtype, tuple(tensor.shape)) for tensor in packed.tensors] for packed in objects]
    write_parts(stream, [pickle.dumps(described)])
    for packed in objects:
        data = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in packed.tensors]
        write_parts(stream, [packed.structure, *data])


def _receive_objects(stream: Any) -> list[PackedObject]:
    objects = []
    for kinds in pickle.loads(read_part(stream)):
        structure = read_part(stream)
        tensors = [_tensor(read_part(stream), *kind) for kind in kinds]
        objects.append(PackedObject(structure, tensors, received=True))
    return objects


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
