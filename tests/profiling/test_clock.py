"""Marks of the host's clock; those of a GPU need one."""

import time
import types

import pytest
import torch

from lightning_egeria.core.profiling.clock import mark, seconds_between


@pytest.fixture
def gpu(monkeypatch):
    """Stands for a GPU: the clock of its stream is set by hand."""

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self, stream):
            self.milliseconds = stream.milliseconds

        def elapsed_time(self, end):
            return end.milliseconds - self.milliseconds

    stream = types.SimpleNamespace(milliseconds=0.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def test_marks_of_the_host_measure_its_time():
    start = mark(torch.device("cpu"))
    time.sleep(0.02)
    end = mark(torch.device("cpu"))
    assert 0.02 <= seconds_between(start, end) < 10


def test_marks_lie_on_the_monotonic_clock():
    before = time.perf_counter()
    assert before <= mark(torch.device("cpu")) <= time.perf_counter()


def test_marks_of_a_stream_count_in_milliseconds(gpu):
    gpu.milliseconds = 100.0
    start = mark(torch.device("cuda"))
    gpu.milliseconds = 350.0
    end = mark(torch.device("cuda", 0))
    gpu.milliseconds = 900.0
    assert seconds_between(start, end) == 0.25


@pytest.mark.parametrize("turned", [False, True])
def test_marks_of_two_clocks_cannot_be_compared(gpu, turned):
    marks = [mark(torch.device("cuda")), mark(torch.device("cpu"))]
    with pytest.raises(TypeError, match="one clock, got"):
        seconds_between(*reversed(marks) if turned else marks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_marks_of_a_gpu_measure_its_stream():
    device = torch.device("cuda")
    start = mark(device)
    torch.cuda._sleep(10_000_000)
    end = mark(device)
    torch.cuda.synchronize()
    assert 0 < seconds_between(start, end) < 10
