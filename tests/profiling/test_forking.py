"""Processes that are forked while there is garbage that only the parent can free."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from lightning_egeria.core.profiling.clock import mark

PROGRAM = """
import gc, os
from lightning_egeria.core.profiling.clock import keep_garbage_in_forks

class OnlyHere:
    born = os.getpid()
    def __del__(self):
        if os.getpid() != self.born:
            os._exit(3)

os.register_at_fork(after_in_child=lambda: [[] for _ in range(10_000)])  # begins collections
keep_garbage_in_forks()
gc.{state}()
one = OnlyHere()
one.itself = one
del one
frozen = gc.get_freeze_count()
child = os.fork()
if not child:
    gc.collect()
    os._exit(7 if gc.isenabled() is {collects} else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert gc.isenabled() is {collects}
assert gc.get_freeze_count() == frozen
"""


@pytest.mark.parametrize(("state", "collects"), [("enable", True), ("disable", False)])
def test_a_forked_process_leaves_garbage_alone(state, collects):
    program = PROGRAM.format(state=state, collects=collects)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_and_pinned_memory_do_not_abort_it():
    gc.disable()
    try:
        garbage = [mark(torch.device("cuda")), torch.zeros(9).pin_memory()]
        garbage[1].to("cuda", non_blocking=True)
        garbage.append(garbage)
        del garbage
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(7)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
