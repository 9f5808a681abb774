"""The guards catch what a test leaves behind, with and without workers."""

from pathlib import Path

import pytest

from support import leftovers

pytest_plugins = "pytester"

LEAKS = """
import logging, logging.config, subprocess, sys, tempfile, threading
from pathlib import Path

import pytest

@pytest.fixture(scope="session", autouse=True)
def end():
    yield
    release.set()
    for child in children:
        child.kill()
        child.wait()

release = threading.Event()
children = []

def test_clean(tmp_path):
    (tmp_path / "file").touch()
    thread = threading.Thread(target=lambda: None)
    thread.start()

def test_thread():
    threading.Thread(target=release.wait, name="left-thread").start()

def test_process():
    children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_file_here():
    Path("left.txt").touch()

def test_temporary_file():
    tempfile.mkstemp(suffix="left.bin")

def test_disabled_logger():
    logging.getLogger("lightning.pytorch")
    logging.config.dictConfig({"version": 1})

def test_logger_is_as_it_was():
    assert not logging.getLogger("lightning.pytorch").disabled
"""


MESSAGES = [
    "threads running: ['left-thread']",
    "child processes running: [",
    "left.bin']",
    "'lightning.pytorch': ((0, True, False, []), (0, True, True, []))",
]

ONE_FILE = """
from pathlib import Path

def test_file_here():
    Path("left.txt").touch()

def test_other():
    pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run tests with the guards as a plugin of their own."""
    tests = pytester.mkdir("tests")
    guards = Path(leftovers.__file__).read_text()
    (tests / "guards").mkdir()
    (tests / "guards" / "leftovers.py").write_text(guards.replace("_GRACE_S = 5.0", "_GRACE_S = 0.2"))
    monkeypatch.setenv("PYTHONPATH", str(tests))

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source, *options):
        (tests / "test_leaks.py").write_text(source)
        return pytester.runpytest_subprocess(
            "-p", "no:cacheprovider", "-p", "guards.leftovers", "-p", "xdist", *options, timeout=60
        )

    return run


def test_leftovers_are_errors_of_their_test(run):
    result = run(LEAKS)
    result.assert_outcomes(passed=7, errors=5)
    assert "/left.txt']" in result.stdout.str()
    assert [message for message in MESSAGES if message not in result.stdout.str()] == []


@pytest.mark.slow
def test_workers_see_the_leftovers_that_are_theirs(run):
    result = run(LEAKS, "-n", "2")
    result.assert_outcomes(passed=7, errors=4)
    assert [message for message in MESSAGES if message not in result.stdout.str()] == []


def test_a_file_left_in_the_repository_fails_the_run(run):
    result = run(ONE_FILE, "-n", "1")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines([r"the tests left files in the repository: \['.*/left\.txt'\]"])


@pytest.mark.slow
def test_a_clean_run_with_workers_passes(run):
    result = run("def test_nothing(tmp_path):\n    (tmp_path / 'file').touch()\n", "-n", "1")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
