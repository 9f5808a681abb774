"""The guards of conftest.py catch what they are there for."""

from pathlib import Path

pytest_plugins = "pytester"

LEAKS = """
import subprocess, sys, tempfile, threading
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
"""


def test_a_thread_a_process_and_files_left_behind_are_errors(pytester):
    tests = pytester.mkdir("tests")
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    (tests / "conftest.py").write_text(conftest.replace("_GRACE_S = 5.0", "_GRACE_S = 0.2"))
    (tests / "test_leaks.py").write_text(LEAKS)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)

    result.assert_outcomes(passed=5, errors=4)
    for message in ("threads running: ['left-thread']", "child processes running: [", "/left.txt']", "left.bin']"):
        assert message in result.stdout.str()
