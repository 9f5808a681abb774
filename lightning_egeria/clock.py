"""Moments on the clock of the device that does the work."""

from __future__ import annotations

import time

import torch


def mark(device: torch.device) -> float | torch.cuda.Event:
    """This moment: of the host's clock, or on a GPU of the stream, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds from one `mark` to a later one; on a GPU both must have been reached."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1000
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    raise TypeError("two marks of one step lie on different clocks")
