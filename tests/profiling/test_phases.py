"""The phases of a training batch."""

import itertools

import pytest
import torch
from torch import nn

from lightning_egeria.core.profiling import phases
from lightning_egeria.core.profiling.phases import BatchPhases, PhaseTimer, exposed_communication


@pytest.fixture
def timer(monkeypatch):
    """A timer on a clock that advances by one second at each look."""
    seconds = itertools.count()
    monkeypatch.setattr(phases, "mark", lambda device: float(next(seconds)))
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(next(seconds)))
    return PhaseTimer(torch.device("cpu"))


def test_phases_of_a_batch(timer):
    timer.batch_start(depth=3)
    timer.forward_end()
    timer.backward_end()
    timer.batch_end(step=7)
    assert list(timer.finished()) == [BatchPhases(7, 3, 1.0, 1.0, 1.0, 0.0, 1.0)]
    assert list(timer.finished()) == []


def test_the_whole_time_begins_when_training_is_ready(timer):
    for label in ("first", None):
        timer.ready()
        timer.batch_start(depth=3)
        timer.forward_end()
        timer.backward_end()
        timer.batch_end(step=7, label=label)
    batches = list(timer.timed())
    assert [(batch.label, batch.seconds) for batch in batches] == [("first", 6.0), (None, 6.0)]
    assert batches[0].phases == BatchPhases(7, 3, 1.0, 1.0, 1.0, 0.0, 1.0)


def test_several_backwards_count_as_one(timer):
    timer.batch_start(depth=0)
    for _ in range(2):
        timer.forward_end()
        timer.backward_end()
    timer.batch_end(step=1)
    (batch,) = timer.finished()
    assert (batch.forward, batch.backward, batch.rest) == (1.0, 2.0, 1.0)


def test_communication_is_part_of_the_backward(timer):
    for communication, expected in ((0.25, (0.75, 0.25)), (9.0, (0.0, 1.0))):
        timer.batch_start(depth=0)
        timer.forward_end()
        timer.backward_end()
        timer.batch_end(step=1, communication=communication)
        (batch,) = timer.finished()
        assert (batch.backward, batch.communication) == expected


def test_a_batch_without_a_backward_is_left_out(timer):
    timer.batch_start(depth=0)
    timer.forward_end()
    timer.batch_end(step=1)
    assert list(timer.finished()) == []


def test_a_batch_without_an_end_is_replaced_by_the_next(timer):
    timer.batch_start(depth=1)
    timer.batch_start(depth=2)
    timer.forward_end()
    timer.backward_end()
    timer.batch_end(step=1)
    assert [batch.depth for batch in timer.finished()] == [2]


def test_moments_outside_a_batch_are_ignored(timer):
    timer.forward_end()
    timer.backward_end()
    timer.batch_end(step=1)
    assert list(timer.finished()) == []


def test_validation_is_not_waiting_for_data(timer):
    for _ in range(10):
        timer.ready()
    timer.batch_start(depth=0)
    timer.forward_end()
    timer.backward_end()
    timer.batch_end(step=1)
    assert [batch.data for batch in timer.finished()] == [1.0]


def test_only_ddp_communicates():
    assert exposed_communication(None) == exposed_communication(nn.Linear(1, 1)) == 0.0
