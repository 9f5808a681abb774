"""When gradients arrive, on a clock that the test turns."""

import pytest
import torch

from lightning_egeria.core.profiling import gradients
from lightning_egeria.core.profiling.gradients import GradientClock
from support.models import mlp


@pytest.fixture
def ticking(monkeypatch):
    """Each look at the clock is a second later."""
    now = iter(range(1000))
    monkeypatch.setattr(gradients, "mark", lambda device: float(next(now)))


def clock_of(net):
    return GradientClock([list(net[2 * index].parameters()) for index in range(4)], torch.device("cpu"))


def test_backward_is_timed_down_to_each_layer_module(ticking):
    net = mlp(blocks=3)
    clock = clock_of(net)
    assert not clock.timed
    loss = net(torch.ones(2, 6)).sum()
    clock.start()
    loss.backward()
    clock.stop()
    assert clock.timed
    assert clock.seconds() == [8.0, 6.0, 4.0]  # weight and bias of each, the head first
    net.zero_grad()
    net(torch.ones(2, 6)).sum().backward()
    assert clock.seconds() == [8.0, 6.0, 4.0]  # it has stopped


def test_what_is_paused_has_no_time(ticking):
    net = mlp(blocks=3)
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    clock = clock_of(net)
    loss = net(torch.ones(2, 6)).sum()
    clock.start()
    net.requires_grad_(True)
    loss.backward()
    clock.stop()
    assert clock.seconds() == [None, None, 4.0]
