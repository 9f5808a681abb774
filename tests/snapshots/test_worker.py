"""A worker answers in order, says why it cannot, and never outlives its owner."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from lightning_egeria.core.snapshots.packing import pack
from lightning_egeria.core.snapshots.worker import NICENESS, Worker
from lightning_egeria.errors import WorkerError


def calling():
    def call(function, *args):
        return function(*args)

    return call


@pytest.fixture(scope="module")
def worker():
    """One for all tests that leave it as it is: it takes seconds to start."""
    worker = Worker(calling)
    yield worker
    worker.close()


@pytest.fixture
def mortal():
    worker = Worker(calling)
    yield worker
    worker.close()


def ask(worker, function, *args):
    return worker.call(*(pack(value, for_process=True).to_host() for value in (function, *args)))


def gone(pid, within_s=120.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_answers_in_order(worker):
    answers = [ask(worker, lambda a, b: (a @ b).sum().item(), torch.ones(2, 3), y * torch.ones(3, 1)) for y in (1, 2)]
    assert not worker.idle
    assert [answer.result(60) for answer in answers] == [6, 12]
    assert worker.idle


def test_state_lives_in_the_process():
    def make():
        seen = []

        def call(value):
            seen.append(value)
            return len(seen)

        return call

    worker = Worker(make)
    assert [worker.call(pack("x", True)).result(60) for _ in range(3)] == [1, 2, 3]
    worker.close()


def test_what_python_itself_passes_over_in_the_path_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    worker = Worker(lambda: len)
    assert worker.call(pack("abc", True)).result(60) == 3
    worker.close()


def test_one_thread_low_priority_and_no_gpu(worker):
    def look():
        import os

        import torch

        return torch.get_num_threads(), os.nice(0) - niceness, torch.cuda.is_available(), os.getpid()

    niceness = os.nice(0)
    threads, nicer, cuda, pid = ask(worker, look).result(60)
    assert (threads, nicer, cuda) == (1, min(NICENESS, 19 - niceness), False)
    assert pid == worker.pid


def test_an_exception_is_an_answer_and_the_next_call_works(worker):
    with pytest.raises(WorkerError, match="ZeroDivisionError: division by zero"):
        ask(worker, lambda: 1 / 0).result(60)
    assert ask(worker, lambda: 3).result(60) == 3
    assert not worker.ended


def test_an_answer_that_cannot_be_sent_is_an_error(worker):
    with pytest.raises(WorkerError, match=r"PicklingError|AttributeError"):
        ask(worker, lambda: lambda: 1).result(60)
    assert ask(worker, lambda: 3).result(60) == 3


def test_a_message_that_cannot_be_sent_ends_the_worker(mortal):
    packed = pack(torch.ones(2), True)
    packed.tensors = ["no tensor"]
    with pytest.raises(WorkerError, match="AttributeError"):
        mortal.call(packed).result(60)
    assert mortal.ended


def test_an_object_that_cannot_be_made_answers_with_the_reason():
    def make():
        raise OSError("nothing here")

    worker = Worker(make)
    for _ in range(2):
        with pytest.raises(WorkerError, match="OSError: nothing here"):
            worker.call(pack(1, True)).result(60)
    worker.close()


def test_a_killed_worker_fails_its_calls(mortal):
    answer = ask(mortal, lambda: __import__("time").sleep(600))
    os.kill(mortal.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="exit status -9"):
        answer.result(60)
    assert mortal.ended
    with pytest.raises(WorkerError):
        ask(mortal, lambda: 1).result(60)


def test_a_worker_that_ends_itself_fails_its_calls(mortal):
    with pytest.raises(WorkerError, match="exit status 7"):
        ask(mortal, lambda: __import__("os")._exit(7)).result(60)


@pytest.mark.parametrize("stopped", [False, True])
def test_close_ends_it_whatever_it_does(mortal, stopped):
    answer = ask(mortal, lambda: __import__("time").sleep(600))
    if stopped:
        os.kill(mortal.pid, signal.SIGSTOP)
    mortal.close()
    mortal.close()
    assert gone(mortal.pid)
    with pytest.raises(WorkerError):
        answer.result(0)


def test_ctrl_c_is_the_owner_s_business(worker):
    assert ask(worker, lambda: 1).result(60) == 1
    os.kill(worker.pid, signal.SIGINT)
    assert ask(worker, lambda: 2).result(60) == 2


@pytest.mark.parametrize(
    ("end", "busy"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        pytest.param("raise SystemExit", True, marks=pytest.mark.slow),
        pytest.param("os._exit(1)", False, marks=pytest.mark.slow),
    ],
)
def test_it_ends_with_its_owner(end, busy):
    program = textwrap.dedent(f"""
        import os, signal, time
        from lightning_egeria.core.snapshots.packing import pack
        from lightning_egeria.core.snapshots.worker import Worker
        worker = Worker(lambda: lambda seconds: time.sleep(seconds))
        worker.call(pack(0, True)).result(60)
        if {busy}:
            worker.call(pack(600, True))
            time.sleep(0.2)
        print(worker.pid, flush=True)
        {end}
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert gone(int(done.stdout))


@pytest.mark.parametrize("option", ["-I", pytest.param("-E", marks=pytest.mark.slow)])
def test_options_of_the_interpreter_hold_in_the_process(option, tmp_path):
    """After -I, no module of PYTHONPATH runs in the owner, and none in the process either."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    program = textwrap.dedent("""
        from lightning_egeria.core.snapshots.packing import pack
        from lightning_egeria.core.snapshots.worker import Worker
        worker = Worker(lambda: abs)
        print(worker.call(pack(-3, True)).result(60))
        worker.close()
    """)
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, option, "-c", program], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "3\n", done.stderr
    assert not (tmp_path / "ran").exists()
