"""What every test must leave as it found it, and one seed for all."""

import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import hypothesis
import lightning as L
import pytest
import torch
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
# Written by the test tools themselves, at any moment.
_TOOL_FOLDERS = {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
_GRACE_S = 5.0

# tqdm's monitor is one thread per process that outlives every progress bar.
tqdm.monitor_interval = 0


# The same inputs every time: what a change did not break does not fail.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")
# pytest tests/fuzz --hypothesis-profile=campaign: as many inputs as there is time for.
hypothesis.settings.register_profile("campaign", max_examples=20_000, derandomize=False, print_blob=True)

# Networks in tests are small: more threads only wait for each other, and for whatever else the machine does.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    L.seed_everything(0, verbose=False)


@pytest.fixture(autouse=True)
def _logs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's logger hands nothing on if there was no handler when it was imported; pytest catches at the root."""
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Send what goes to the system's temporary folder to one that no other program writes to."""
    folder = tmp_path_factory.mktemp("tempfile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _nothing_compiled_left() -> Iterator[None]:
    """The compiler has processes of its own, and that of torch before 2.8 keeps pointers to backends that are gone, and
    asks them when it meets the same code again: a crash, sooner or later (pytorch#155057)."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    workers = sys.modules.get("torch._inductor.async_compile")
    if workers is not None:
        workers.shutdown_compile_workers()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = _settle(lambda: {thread for thread in threading.enumerate() if thread.is_alive()} - before)
    assert not left, f"the test left threads running: {sorted(thread.name for thread in left)}"


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = _child_processes()
    yield
    left = _settle(lambda: _child_processes() - before)
    assert not left, f"the test left child processes running: {sorted(left)}"


@pytest.fixture(autouse=True)
def _no_file_left(_own_temporary_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folders = {REPOSITORY, Path.cwd(), _own_temporary_folder}
    tmp_paths = tmp_path_factory.getbasetemp()
    before = {folder: _files(folder, tmp_paths) for folder in folders}
    yield
    left = set().union(*(_files(folder, tmp_paths) - before[folder] for folder in folders))
    assert not left, f"the test left files outside tmp_path: {sorted(left)}"


def _settle(leftovers):
    """Give threads and processes that are on their way out the time to go."""
    deadline = time.monotonic() + _GRACE_S
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _child_processes() -> set[int]:
    # Python keeps its resource tracker, and the server that forks for it, until the interpreter ends.
    kept = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }
    children = {process.pid for process in multiprocessing.active_children()}
    # Linux also tells of the children that multiprocessing did not start.
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            children.update(map(int, task.read_text().split()))
        except OSError:  # that thread has just ended
            continue
    return children - kept


def _files(folder: Path, tmp_paths: Path) -> set[str]:
    """List the files below a folder, leaving out environments, what the test tools write, and every `tmp_path`."""
    found = set()
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in _TOOL_FOLDERS
            and not name.startswith("pymp-")  # where multiprocessing's server listens
            and Path(parent, name) != tmp_paths
            and not Path(parent, name, "pyvenv.cfg").is_file()
        ]
        # An editor at work beside a test run is not the test's doing, and no test writes Python source.
        found.update(str(Path(parent, name)) for name in files if not name.endswith((".py", ".swp", "~")))
    return found
