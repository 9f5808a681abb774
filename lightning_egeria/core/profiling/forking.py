"""Fork safety: CUDA objects that a child process inherits must not be collected there."""

from __future__ import annotations

import functools
import gc
import os
import threading

_parent = threading.local()


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
