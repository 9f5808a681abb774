"""Time marks on the clock of the device that does the work, and how fast a CPU is."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time

import torch

_parent = threading.local()


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Mark this moment: on the host's clock, or on the current CUDA stream, without waiting for the GPU.

    With CUDA, processes that are forked from then on keep what they inherit: see `keep_garbage_in_forks`.
    """
    if device.type != "cuda":
        return time.perf_counter()
    keep_garbage_in_forks()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Return the seconds from one `mark` to a later one. A GPU must have reached both.

    Raises:
        TypeError: if one mark is from the host's clock and the other from a GPU.
    """
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1000
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    raise TypeError(f"both marks must come from one clock, got {type(start).__name__} and {type(end).__name__}")


def wait_for(moment: float | torch.cuda.Event) -> None:
    """Wait until the device has reached a `mark`."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def reached(moment: float | torch.cuda.Event) -> bool:
    """Whether the device has reached a `mark`; a GPU does so some time after the call."""
    return not isinstance(moment, torch.cuda.Event) or bool(moment.query())


def seconds_of_product(dtype: torch.dtype, size: int = 256) -> float:
    """Return the fastest of five timings of a square matrix product on this CPU.

    >>> seconds_of_product(torch.float32, 4) < 1
    True
    """
    matrix, found = torch.ones(size, size, dtype=dtype), []
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        found.append(time.perf_counter() - started)
    return min(found)


@functools.cache
def keep_garbage_in_forks() -> None:
    """Let no forked process, such as a worker of a data loader, collect garbage that it was born with.

    To free an event of CUDA or pinned memory, PyTorch asks CUDA, which a forked process cannot: it is aborted.
    """
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def _before() -> None:
    _parent.collects = gc.isenabled()
    gc.disable()  # what else runs at a fork may make objects, and so begin a collection


def _after_in_parent() -> None:
    if getattr(_parent, "collects", False):
        gc.enable()


def _after_in_child() -> None:
    gc.freeze()
    _after_in_parent()
