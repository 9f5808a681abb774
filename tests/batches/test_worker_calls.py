"""Calls into the worker processes of a DataLoader."""

import os
import signal
import time

import pytest
from torch.utils.data import DataLoader, get_worker_info

from lightning_egeria.core.batches.reading import LoaderCopies
from lightning_egeria.core.batches.worker_calls import answer_calls, this_worker
from lightning_egeria.errors import WorkerError


class Squares:
    """Says which worker has loaded each sample."""

    def __init__(self):
        self.items = [0, 1, 4, 9, 16, 25, 36, 49]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.items[index], this_worker()

    def called(self, index):
        if index == 8:
            raise LookupError("no sample 8")
        if index == 7:
            time.sleep(1)
        if index == 6:
            os._exit(0)
        info = get_worker_info()
        return self.items[index], info.id, info.num_workers, os.getpid(), self.opened


def _open(worker):
    data = get_worker_info().dataset
    data.opened = worker
    answer_calls(data.called)


def _same(samples):
    return samples


class Running:
    def __init__(self, context=None):
        self.data, copies = Squares(), LoaderCopies()
        loader = DataLoader(self.data, 2, num_workers=2, multiprocessing_context=context)
        self.copy, self.workers = copies.with_calls(
            loader, dataset=self.data, batch_size=2, collate_fn=_same, worker_init_fn=_open
        )
        self.iterator = iter(self.copy)
        batches = list(self.iterator)
        self.found = [batch[0][1] for batch in batches[:2]]


@pytest.fixture(scope="module")
def running():
    return Running()


def check(running):
    assert len(set(running.found)) == 2
    running.data.items = []  # of this process
    for number, worker in enumerate(running.found):
        assert running.workers.has(worker)
        square, *others, pid, opened = running.workers.call(worker, 5)
        assert (square, others, opened) == (25, [number, 2], number)
        assert pid == worker.pid != os.getpid()


def test_a_worker_answers_with_what_it_has(running):
    check(running)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_contexts(context):
    check(Running(context))


def test_an_error_is_raised_where_the_call_was_made(running):
    with pytest.raises(LookupError, match="no sample 8"):
        running.workers.call(running.found[0], 8)
    assert running.workers.call(running.found[0], 2)[0] == 4


def test_an_answer_that_was_not_waited_for_is_not_the_next(running):
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            running.workers.call(running.found[1], 7)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert running.workers.call(running.found[1], 3)[0] == 9


def test_workers_that_end_or_are_others_cannot_be_called():
    first, second = Running(), Running()
    assert not first.workers.has(second.found[0])
    assert not first.workers.has(None)
    with pytest.raises(WorkerError, match="ended while it loaded"):
        first.workers.call(first.found[0], 6)
    assert not first.workers.has(first.found[0])
    pid = os.fork()
    if not pid:
        os._exit(second.workers.has(second.found[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert second.workers.has(second.found[0])


def test_this_process_is_no_worker():
    assert this_worker() is None
