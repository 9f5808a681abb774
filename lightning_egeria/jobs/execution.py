"""Runs one job from its folder: the same on this machine, under Slurm and under Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.arguments import quantity
from lightning_egeria.core.programs.processes import PREEMPTED, ProgramProcess, kill_marked
from lightning_egeria.errors import JobError, ProgramError
from lightning_egeria.jobs import preparing
from lightning_egeria.jobs.jobfolders import JobFolder, State, Status
from lightning_egeria.jobs.redaction import Redactor, looks_secret
from lightning_egeria.jobs.rundirs import read_run_directory

BEAT_S = 2.0
_MOST_SAID = 2**16  # bytes of a notification's output in the log
_POLL_S = 0.1
_STATUS = {State.DONE: 0, State.FAILED: 1, State.CANCELLED: 2, State.PREEMPTED: PREEMPTED}
ALREADY = 3  # exit status: another process has the job


class Execution:
    """Watches one job until it ends, or is stopped.

    Args:
        path: folder of the job.
        environments: folder of the environments; beside the folders of the jobs if left out.
    """

    def __init__(self, path: Path, environments: Path | None = None) -> None:
        self.folder = JobFolder(path.resolve())
        self.environments = environments or self.folder.path.parent.parent / "environments"
        self.stop: State | None = None
        self._status = Status()

    def run(self, token: str = "") -> int:
        """Run the job, with its retries; returns the exit status of this process.

        Args:
            token: that the queue gave to this process. One that it has replaced since does nothing.
        """
        submission = self.folder.submission()
        with self.folder.watched() as free:
            if not free:
                return ALREADY
            self._status = self.folder.status()
            if self._status.state.final:
                return _STATUS[self._status.state]
            if token != self.folder.token():
                return ALREADY
            if self.folder.asked is State.PREEMPTED:  # an earlier attempt was
                self.folder.forget_asked()
            if kill_marked(self.folder.path):
                self.folder.tell("execute", "killed what an earlier attempt had left")
            while True:
                self._attempt(Path(submission.run), Path(submission.origin))
                if self._status.state is not State.QUEUED:
                    break
            return _STATUS[self._status.state]

    def request(self, state: State) -> None:
        """Ask the job to end, so that it is then preempted or cancelled. Safe in a signal handler."""
        self.stop = self.stop or state

    def _attempt(self, run: Path, origin: Path) -> None:
        status = self._status
        status.attempt += 1
        status.state, status.started, status.ended, status.message = State.RUNNING, time.time(), None, ""
        status.host = socket.gethostname()
        status.progress = self.folder.progress()
        job: Mapping[str, Any] = {"retries": 0, "notifications": {}}
        try:
            self.folder.beat()
            self.folder.write_status(status)
            self.folder.tell("execute", f"attempt {status.attempt} starts on {status.host}")
            job = read_run_directory(run)
            status.devices = status.devices or job["resources"]["devices"]
            self.folder.redact = Redactor(secrets_of(job, os.environ)).text
            status.state, status.message = self._run(job, run, origin)
        except JobError as error:
            status.state, status.message = State.FAILED, f"{error.layer}: {error}"
        except ProgramError as error:
            status.state, status.message = State.FAILED, f"execute: {error}"
        except OSError as error:
            status.state, status.message = State.FAILED, f"execute: {error.filename or ''} {error.strerror or error}"
        self._settle(job["retries"])
        status = self._status
        with contextlib.suppress(OSError):  # the disk is full
            self.folder.tell("execute", f"attempt {status.attempt}: {status.state} {status.message}".rstrip())
        self._notify(job)

    def _settle(self, retries: int) -> None:
        """Write how the attempt has ended; waits while the disk is full.

        Raises:
            OSError: the status cannot be written whatever room there is; the queue ends the job then.
        """
        while True:
            decided = dataclasses.replace(self._status)
            try:
                self.folder.settle(decided, retries, stopping=self.stop is not None)
            except OSError as error:
                if not files.may_pass(error):
                    raise
                time.sleep(BEAT_S)
            else:
                self._status = decided
                return

    def _run(self, job: Mapping[str, Any], run: Path, origin: Path) -> tuple[State, str]:
        folder = self.folder
        python = preparing.python_for(job, run, self.environments, folder)
        data = preparing.data_for(job, origin, folder)
        preparing.work_for(run, folder)
        variables = preparing.variables_for(job, folder, self._status, data)
        command = preparing.command_for(job, folder, python, self._status.devices)
        folder.tell("execute", preparing.explain_command(command))
        process = ProgramProcess(command, folder.path, variables, folder.work)
        try:
            sent, whole = self._watch(process, job, Redactor(secrets_of(job, variables)))
        finally:
            status = process.stop(0)
        state, message = _outcome(status, sent, trains=job["entry"]["experiment"] is not None)
        return state, message if whole else "; ".join(
            [*filter(None, [message]), "execute: the end of the log is missing: it could not be written"]
        )

    def _watch(self, process: ProgramProcess, job: Mapping[str, Any], redactor: Redactor) -> tuple[State | None, bool]:
        """Wait for the end of a process; returns why it was asked to end, if it was, and whether the log is whole."""
        grace = quantity(job["checkpoints"]["grace"])
        limit = job["resources"]["time"]
        asks = time.monotonic() + quantity(limit) - min(grace, quantity(limit) / 2) if limit else float("inf")
        trains = job["entry"]["experiment"] is not None
        sent, killed_at, last_beat = None, float("inf"), time.monotonic()
        with _Output(process, self.folder.log, redactor) as output:
            while process.poll() is None:
                now = time.monotonic()
                if now >= asks and self.stop is None:
                    self.folder.tell("execute", f"the time limit of {limit} is near")
                    self.request(State.PREEMPTED)
                if now - last_beat >= BEAT_S:
                    self.folder.beat()
                    last_beat = now
                asked = self.folder.asked
                if asked is State.CANCELLED:  # however it was to end before
                    self.stop = asked
                elif asked is not None:
                    self.request(asked)
                if self.stop is not None and sent is not self.stop:
                    saves = trains and self.stop is State.PREEMPTED
                    process.ask_to_end(signal.SIGUSR1 if saves else signal.SIGTERM)
                    self.folder.tell("execute", f"asked to end within {grace} s: {self.stop}")
                    sent, killed_at = self.stop, min(killed_at, now + grace)
                if now >= killed_at:
                    process.kill()
                output.copy()
        return sent, not output.full

    def _notify(self, job: Mapping[str, Any]) -> None:
        command = job["notifications"].get(self._status.state.value)
        if not command:
            return
        submission = self.folder.submission()
        told = {"EGERIA_JOB_ID": str(submission.id), "EGERIA_JOB_NAME": submission.name}
        told |= {"EGERIA_JOB_STATE": self._status.state.value, "EGERIA_JOB_MESSAGE": self._status.message}
        with tempfile.TemporaryFile() as output:
            try:
                subprocess.run(
                    command,
                    cwd=self.folder.work,
                    env={**os.environ, **told},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=60,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                self.folder.tell("execute", f"the notification failed: {error}")
            output.seek(0)
            if said := output.read(_MOST_SAID).decode(errors="replace"):
                self.folder.tell("notification", said)


class _Output:
    """Copies what a process prints to the log. When the disk is full, the job continues without."""

    def __init__(self, process: ProgramProcess, log: Path, redactor: Redactor) -> None:
        self._pipe, self._redactor = process.output, redactor
        self._log = files.adding(log)
        self.full = False

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *reason: object) -> None:
        while self._read():
            pass
        self._write(self._redactor.end())
        self._log.close()

    def copy(self) -> None:
        """Copy what is there, or wait a moment."""
        ready, _, _ = select.select([self._pipe], [], [], _POLL_S)
        if not ready or not self._read():
            time.sleep(0.01)

    def _read(self) -> bool:
        try:
            data = os.read(self._pipe, 2**16)
        except BlockingIOError:
            return False
        self._write(self._redactor.feed(data))
        return bool(data)

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._log.write(data) :]
        except OSError:
            self.full = True


def secrets_of(job: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the values that the log must not have: declared secrets, and others that look like one."""
    declared, written = job["environment"]["secrets"], job["environment"]["variables"]
    guessed = [name for name, value in variables.items() if name not in written and looks_secret(name, value)]
    return {name: variables[name] for name in (*declared, *guessed) if name in variables}


def _outcome(code: int, sent: State | None, trains: bool) -> tuple[State, str]:
    """Return the state after an exit status, and what to say of it.

    Args:
        code: exit status, minus the number of the signal that ended the program.
        sent: why it was asked to end; None if it was not.
        trains: whether it is an experiment. One that was asked to end and has saved ends with `PREEMPTED`. Other
            programs may end with 0 then: Lightning does after SIGTERM, in the middle of training.
    """
    if code == 0 and (sent is None or trains):
        return State.DONE, ""
    if sent is not None:
        return sent, ""
    if code == PREEMPTED:
        return State.PREEMPTED, ""
    if code == -signal.SIGKILL:
        return State.LOST, "execute: killed from outside, or for want of memory"
    if code < 0:
        return State.FAILED, f"execute: ended by {signal.Signals(-code).name}"
    return State.FAILED, f"execute: ended with status {code}; its log says why"


@contextlib.contextmanager
def stopping_on_signals(execution: Execution) -> Iterator[None]:
    """Preempt the job on SIGTERM, SIGUSR1, SIGUSR2 and SIGINT."""

    def stop(number: int, frame: object) -> None:
        execution.request(State.PREEMPTED)

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """Run the job whose folder is the first argument; the second is the queue's token."""
    path, *token = sys.argv[1:]
    try:
        execution = Execution(Path(path))
        with stopping_on_signals(execution):
            return execution.run(*token)
    except JobError as error:
        print(f"{error.layer}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"execute: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
