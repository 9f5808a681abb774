"""Private names of Rich and TQDM: what they show during training."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager

import rich

from lightning_egeria.upstream.needs import lacking


def above_tqdm() -> AbstractContextManager[object]:
    """Return a context in which TQDM's bars, which stand at the end of an open line, are off the terminal."""
    tqdm = sys.modules.get("tqdm")
    # Without a bar, tqdm would make a lock for several processes first.
    if tqdm is None or not getattr(tqdm.tqdm, "_instances", True):
        return contextlib.nullcontext()
    above: AbstractContextManager[object] = tqdm.tqdm.external_write_mode()
    return above


def rich_at_rest() -> AbstractContextManager[object]:
    """Return a context in which the live displays of Rich draw nothing.

    Rich looks where the bar stands, and writes later: its own thread would draw in between.
    """
    at_rest = contextlib.ExitStack()
    for live in getattr(rich.get_console(), "_live_stack", ()):  # before Rich 14.1 there is one at most, and no stack
        at_rest.enter_context(live._lock)
    return at_rest


def missing() -> list[str]:
    """Return the private names that are missing; without TQDM, its own do not matter."""
    tqdm = sys.modules.get("tqdm")
    return [] if tqdm is None else lacking(tqdm.tqdm, ["external_write_mode"])
