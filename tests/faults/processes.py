"""Runs a job in a process of its own, does something to it, and sees what it leaves behind."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lightning_egeria
from faults.job import RESULT, Job
from support.ranks import PROCESSES

_PACKAGE = str(Path(lightning_egeria.__file__).parent)
LOG = "log"  # of a job that was killed before it began there is none
LIMIT_S = 120.0  # a job takes seconds; one that takes so long hangs
GRACE_S = 10.0  # for processes on their way out


@dataclasses.dataclass
class Ended:
    """What became of a job.

    Attributes:
        exit_status: of its process, negative for a signal; None: it did not end in time and was killed.
        result: what it kept, None if nothing.
        left: what it should not have left: processes, shared memory, temporary files.
        seconds: that it took.
        log: what it printed.
    """

    exit_status: int | None
    result: dict[str, Any] | None
    left: list[str]
    seconds: float
    log: str


class AtLine:
    """Does something just before the calling thread runs the so-manieth line of the package; None only counts them."""

    def __init__(self, number: int | None = None, act: Callable[[], None] | None = None) -> None:
        self.number, self.act, self.count = number, act, 0

    def begin(self) -> None:
        """From here on."""
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.number and self.act is not None:
                self.act()
        return self._line


@dataclasses.dataclass
class SignalSelf:
    """Sends a signal to the process that it is called in."""

    number: signal.Signals

    def __call__(self) -> None:
        os.kill(os.getpid(), self.number)


def run(
    job: Job,
    begin: Callable[[], None] | None = None,
    meanwhile: Callable[[BaseProcess], None] | None = None,
    limit_s: float = LIMIT_S,
) -> Ended:
    """Run a job to its end.

    Args:
        job: to be run.
        begin: called in its process before it.
        meanwhile: called here while it runs.
        limit_s: after which it hangs.
    """
    return finish(start(job, begin), job, meanwhile, limit_s)


def start(job: Job, begin: Callable[[], None] | None = None) -> BaseProcess:
    """Start a job; to be followed by `finish`."""
    job.folder.mkdir(parents=True, exist_ok=True)
    process = PROCESSES.Process(target=_in_process, args=(job, begin))
    process.start()
    return process


def finish(
    process: BaseProcess, job: Job, meanwhile: Callable[[BaseProcess], None] | None = None, limit_s: float = LIMIT_S
) -> Ended:
    """Wait for the end of a job that was started."""
    began, shared, pid = time.monotonic(), _shared_memory(), process.pid
    assert pid is not None
    if meanwhile is not None:
        meanwhile(process)
    process.join(limit_s)
    exit_status = process.exitcode
    if exit_status is None:
        process.kill()
        process.join()
    process.close()
    seconds = time.monotonic() - began
    deadline = time.monotonic() + GRACE_S
    while (left := _left_by(pid, shared)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for other in _session(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    left += [f"file {path}" for path in sorted((job.folder / "tmp").rglob("*")) if not _is_of_torch(path)]
    result = None
    with contextlib.suppress(FileNotFoundError):
        result = json.loads((job.folder / RESULT).read_text())
    log = job.folder / LOG
    return Ended(exit_status, result, left, seconds, log.read_text(errors="replace") if log.is_file() else "")


def _is_of_torch(path: Path) -> bool:
    """Torch 2.6 writes a module when it is imported, and leaves it where a process ends as multiprocessing has it."""
    module = "_remote_module_non_scriptable.py"
    return path.name == module or (path / module).is_file()


def lines_of(job: Job) -> int:
    """How many lines of the package a job runs in its main thread."""
    ended = run(job, AtLine().begin)
    assert ended.result is not None, ended.log
    return int(ended.result["lines"])


def after_a_while(chance: random.Random, longest_s: float, number: signal.Signals) -> Callable[[BaseProcess], None]:
    """Sends a signal to a job after a random time."""
    delay = chance.uniform(0, longest_s)

    def send(process: BaseProcess) -> None:
        process.join(delay)
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)

    return send


def _in_process(job: Job, begin: Callable[[], None] | None) -> None:
    os.setsid()  # whatever it starts belongs to its session
    # Semaphores have its number in their names: another program's may be left to its resource tracker meanwhile.
    multiprocessing.current_process()._config["semprefix"] = f"/mp-{os.getpid()}"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what runs in the background
    log = os.open(job.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if begin is not None:
        begin()
    result = job.run()
    sys.settrace(None)
    owner = getattr(begin, "__self__", None)
    if isinstance(owner, AtLine):
        (job.folder / RESULT).write_text(json.dumps(result | {"lines": owner.count}))
    # Lightning ends the interpreter where it is asked to; whether threads hold it back is seen by that.
    sys.exit(0 if result["ended"] == "well" else 1)


def _session(pid: int) -> list[int]:
    """Processes of the session that a job began."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


GRACE_S = 10.0  # for shared memory of other programs to go


def _left_by(pid: int, shared: set[str]) -> list[str]:
    new = {name for name in _shared_memory() - shared if not name.startswith("sem.mp-") or f"mp-{pid}-" in name}
    deadline = time.monotonic() + GRACE_S
    while new and time.monotonic() < deadline:  # perhaps of another program that runs beside, and ends
        new = (new - _mapped(new)) & _shared_memory()
        time.sleep(0.1)
    return [f"process {other}" for other in _session(pid)] + [f"shared memory {name}" for name in sorted(new)]


def _mapped(names: set[str]) -> set[str]:
    """Those in the memory of a process that lives."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            found |= {name for name in names if name in text}
    return found


def _shared_memory() -> set[str]:
    """Of the kinds that torch and Python make; other programs have theirs."""
    folder = Path("/dev/shm")
    return {path.name for kind in ("torch_*", "sem.*", "psm_*", "mp-*") for path in folder.glob(kind)}
