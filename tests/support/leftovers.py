"""Every test leaves threads, processes, files and the logging state as it found them.

Several workers (``-n 2``) share the repository's folder. A file that one of them writes there for a moment must not
fail a test of another, so only the controller looks, before the first test and after the last. Threads, processes,
temporary folders and the working folder belong to one worker each and are looked at after every test.
"""

import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

REPOSITORY = Path(__file__).resolve().parents[2]
# Written by the test tools themselves, at any moment.
_TOOL_FOLDERS = {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
_GRACE_S = 5.0
# Between the root, where pytest catches records, and the logger of this package.
_LOGGERS = ["", "lightning", "lightning.fabric", "lightning.pytorch", "lightning.pytorch.lightning_egeria"]


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Send what goes to the system's temporary folder to one that no other program writes to."""
    folder = tmp_path_factory.mktemp("tempfile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = _settle(lambda: {thread for thread in threading.enumerate() if thread.is_alive()} - before)
    assert not left, f"the test left threads running: {sorted(thread.name for thread in left)}"


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = child_processes()
    yield
    left = _settle(lambda: child_processes() - before)
    assert not left, f"the test left child processes running: {sorted(left)}"


@pytest.fixture(autouse=True)
def _no_file_left(
    _own_temporary_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[None]:
    folders = {REPOSITORY, Path.cwd(), _own_temporary_folder}
    if hasattr(request.config, "workerinput"):
        folders -= {REPOSITORY}
    tmp_paths = tmp_path_factory.getbasetemp()
    before = {folder: _files(folder, tmp_paths) for folder in folders}
    yield
    left = set().union(*(_files(folder, tmp_paths) - before[folder] for folder in folders))
    assert not left, f"the test left files outside tmp_path: {sorted(left)}"


@pytest.fixture(autouse=True)
def _data_loader_as_it_was() -> Iterator[None]:
    # Lightning leaves its own methods in place of those of DataLoader after an error in a loader hook, and the next
    # loader of the process fails.
    names = ("__init__", "__setattr__", "__delattr__")
    before = {name: vars(DataLoader)[name] for name in names if name in vars(DataLoader)}
    yield
    for name in names:
        if name in before:
            setattr(DataLoader, name, before[name])
        elif name in vars(DataLoader):
            delattr(DataLoader, name)
        if f"__old{name}" in vars(DataLoader):
            delattr(DataLoader, f"__old{name}")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    before = logging_state()
    yield
    after = logging_state()
    restore_logging(before)  # otherwise a later test fails, for a reason that nobody finds there
    changed = {name or "root": (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"the test changed (level, propagate, disabled, handlers) of the loggers: {changed}"


def logging_state() -> dict[str, tuple[int, bool, bool, list[logging.Handler]]]:
    loggers = {name: logging.getLogger(name) for name in _LOGGERS}
    return {name: (log.level, log.propagate, log.disabled, [*log.handlers]) for name, log in loggers.items()}


def restore_logging(state: dict[str, tuple[int, bool, bool, list[logging.Handler]]]) -> None:
    for name, (level, propagate, disabled, handlers) in state.items():
        logger = logging.getLogger(name)
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.setLevel(level)
        logger.propagate, logger.disabled, logger.handlers[:] = propagate, disabled, handlers


class _RepositoryCheck:
    """Fails the whole run if the workers leave a file in the repository."""

    def __init__(self, tmp_paths: Path) -> None:
        self._tmp_paths = tmp_paths
        self._before = _files(REPOSITORY, tmp_paths)
        self._left: list[str] = []

    @pytest.hookimpl(trylast=True)  # the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._left = sorted(_files(REPOSITORY, self._tmp_paths) - self._before)
        if self._left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.write_line(f"the tests left files in the repository: {self._left}", red=True)
            terminalreporter.write_line("run them without -n to see which test did", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(_RepositoryCheck(Path(config.getoption("basetemp") or tempfile.gettempdir())))


def _settle(leftovers):
    """Give threads and processes that are on their way out the time to go."""
    deadline = time.monotonic() + _GRACE_S
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def child_processes() -> set[int]:
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
        found.update(f"{parent}/{name}" for name in files if not name.endswith((".py", ".swp", "~")))
    return found
