"""Descriptions, homes and jobs, as the tests of jobs need them."""

import contextlib
import os
import sys
import time
from pathlib import Path

from lightning_egeria.jobs.backends import Queued
from lightning_egeria.jobs.endings import note_end
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import JobFolder, State, Submission
from lightning_egeria.jobs.rules import read_description
from lightning_egeria.jobs.submission import submit
from support.leftovers import child_processes

PYTHON = sys.executable


def described(folder, text="", **keys):
    """Read a description of a command that prints hello, with more lines."""
    Path(folder).mkdir(exist_ok=True, parents=True)
    path = Path(folder) / "job.yaml"
    path.write_text("name: hello\nentry: {command: echo hello}\n" + text)
    return read_description(path, [f"{name}={value}" for name, value in keys.items()])


class Quiet(Queued):
    """A local back end without a queue, which a test runs itself."""

    def start(self, jobs):
        return {}


def submitted(home, description, history, after=()):
    compiled = home.compiler(history).compile(description)
    return submit(home, history, Quiet(home), compiled, description.folder, after)


def ended(home, history, id, state, when=None):
    """A job came to its end, at a moment in seconds."""
    folder = home.folder(id)
    status = folder.status()
    status.state, status.ended = State(state), when or time.time()
    folder.write_status(status)
    note_end(history, id)


def folder_of(tmp_path, description):
    """Compile one job and make its folder, without a queue."""
    home = Home(tmp_path / "home")
    with home.history() as history:
        (compiled,) = home.compiler(history).compile(description)
    submission = Submission(1, compiled.name, str(compiled.path), str(description.folder), "local")
    return JobFolder.create(home.jobs / "1", submission)


def all_reaped(before=frozenset()):
    """Whether no process is left that this one has started, but those of before."""
    for child in child_processes() - before:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    return not child_processes() - before


def until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
