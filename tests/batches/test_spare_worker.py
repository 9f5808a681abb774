"""A worker process that loads on request."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_egeria.batches.spare_worker import Requests, SpareWorker
from lightning_egeria.snapshots.random_state import RandomState

opened = []


def _open(worker):
    opened.append(get_worker_info().dataset.dataset[worker])


@pytest.fixture
def spare():
    data = [10, 20, 30]

    def load(place):
        if place == 7:
            raise LookupError("no sample 7")
        if place == 8:
            time.sleep(1)
        return data[place % 3], opened[0], os.getpid()

    found = SpareWorker(DataLoader(data, num_workers=2), Requests(data, load), _open)
    data.clear()
    yield found
    found.close()


def test_it_has_the_data_as_they_were_when_it_started(spare):
    assert [spare.load(place)[:2] for place in (2, 0)] == [(30, 10), (10, 10)]
    assert spare.load(1)[2] != os.getpid()
    assert spare.load(1)[2] == spare.load(0)[2]
    assert not opened


def test_an_error_is_that_of_its_request(spare):
    with pytest.raises(LookupError, match="no sample 7"):
        spare.load(7)
    assert spare.load(2)[0] == 30


def test_an_answer_that_was_not_waited_for_is_not_the_next(spare):
    spare.load(1)

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            spare.load(8)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert spare.load(2)[0] == 30


def test_no_random_number_moves():
    before = RandomState.current()
    spare = SpareWorker(DataLoader([0], num_workers=1), Requests([0], torch.zeros), None)
    assert spare.load(2).tolist() == [0, 0]
    spare.close()
    spare.close()
    assert RandomState.current() == before
