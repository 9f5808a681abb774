"""An object that lives in a process of its own.

The process is started anew from the interpreter, not forked and without the user's main module: a script needs no
``if __name__ == "__main__"``, and no lock or CUDA context is inherited. The two talk over the worker's standard input
and output, which nobody else can open, and the worker ends when its input does: when its owner is gone, however that
happened.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.parcels import Parcel, pack, unpack

NICENESS = 10  # of 19: with every core taken, a worker gets about a tenth of one
_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 16 * 2**20


class Worker:
    """A process that holds one object and calls it with what it is given, in order.

    Attributes:
        ended: whether it was killed, or a call failed because the process had ended.

    Args:
        make: called without arguments in the process; gives the object.
        threads: intra-op threads of torch there.

    Raises:
        Exception: whatever pickling raises, if ``make`` cannot be sent.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]], threads: int = 1) -> None:
        folders = [entry for entry in sys.path if isinstance(entry, str)]  # type: ignore[redundant-expr]  # not all are
        program = f"import sys; sys.path[:] = {folders!r}; from {__name__} import serve; serve()"
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
        first = pack((make, threads))
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **hidden},
        )
        self._messages: queue.SimpleQueue[tuple[tuple[Parcel, ...], Future[Any]] | None] = queue.SimpleQueue()
        self._newest: Future[Any] | None = None
        self.ended = False
        self._reason = ""
        # A daemon, or an interpreter that ends without `close` would wait for the worker.
        self._thread = threading.Thread(target=self._talk, args=(first,), name="egeria-worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether all calls so far are answered."""
        return self._newest is None or self._newest.done()

    def call(self, *arguments: Parcel) -> Future[Any]:
        """Have the object called with what the parcels hold; returns at once.

        Args:
            arguments: one parcel each, in host memory.

        Returns:
            Future of what the object returned. Its exception is a `WorkerError` if the object raised, or the process
            ended.
        """
        answer: Future[Any] = Future()
        self._newest = answer
        self._messages.put((arguments, answer))
        return answer

    def kill(self, reason: str) -> None:
        """End the process; the calls without an answer fail with ``reason``."""
        self._reason, self.ended = reason, True
        self._process.kill()

    def close(self) -> None:
        """End the process, whatever it does. Calls without an answer fail with `WorkerError`. Safe to call twice."""
        self._process.kill()
        self._messages.put(None)
        self._thread.join()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was left to flush has nowhere to go
                    stream.close()

    def _talk(self, first: Parcel) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # for the type checker: both were asked for
        assert stdout is not None
        with contextlib.suppress(OSError):
            _send(stdin, first)
        while (message := self._messages.get()) is not None:
            arguments, answer = message
            try:
                for parcel in arguments:
                    parcel.wait()
                _send(stdin, *arguments)
                succeeded, value = pickle.loads(_receive(stdout))
            except (OSError, EOFError):
                self.ended = True
                succeeded, value = False, self._reason or f"its process ended with exit status {self._process.wait()}"
            except Exception as error:  # half a message may be under way: nothing after it would be understood
                self._process.kill()
                self.ended = True
                succeeded, value = False, f"{type(error).__name__}: {error}"
            if succeeded:
                answer.set_result(value)
            else:
                answer.set_exception(WorkerError(value))


def serve() -> None:
    """What the process does: make the object, then call it with one parcel after the other."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the user's modules print goes where errors go, not between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the owner decides
    with contextlib.suppress(AttributeError, OSError):
        os.nice(NICENESS)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arrived: queue.SimpleQueue[list[Parcel]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, arrived), daemon=True).start()
    try:
        make, threads = unpack(arrived.get()[0])
        torch.set_num_threads(threads)
        target = make()
    except Exception as error:  # a module that cannot be imported here may raise anything
        target = functools.partial(_fail, error)
    while True:
        arguments = arrived.get()
        try:
            reply = pickle.dumps((True, target(*map(unpack, arguments))))
        except Exception as error:  # whatever the user's modules raise
            reply = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        _write(answers, [reply])


def _fail(error: Exception, *_: Any) -> None:
    raise error


def _read(requests: BinaryIO, arrived: queue.SimpleQueue[list[Parcel]]) -> None:
    """Take requests in as they come, and end the process with the owner, whatever it does at that moment."""
    try:
        while True:
            arrived.put(_receive_parcels(requests))
    except (OSError, EOFError):
        os._exit(0)


def _send(stream: Any, *parcels: Parcel) -> None:
    described = [[(tensor.dtype, tuple(tensor.shape)) for tensor in parcel.tensors] for parcel in parcels]
    _write(stream, [pickle.dumps(described)])
    for parcel in parcels:
        data = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in parcel.tensors]
        _write(stream, [parcel.structure, *data])


def _receive_parcels(stream: Any) -> list[Parcel]:
    parcels = []
    for kinds in pickle.loads(_receive(stream)):
        structure = _receive(stream)
        parcels.append(Parcel(structure, [_tensor(_receive(stream), *kind) for kind in kinds]))
    return parcels


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _write(stream: Any, parts: list[Any]) -> None:
    for part in parts:
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def _receive(stream: Any) -> bytearray:
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return _read_exactly(stream, length)


def _read_exactly(stream: Any, length: int) -> bytearray:
    """Room is made as the bytes come: what a library prints before `serve` would be taken for a length."""
    data = bytearray()
    filled = 0
    while filled < length:
        if filled == len(data):
            data += bytes(min(_PIECE_BYTES, length - filled))
        count = stream.readinto(memoryview(data)[filled:])
        if not count:
            raise EOFError
        filled += count
    return data
