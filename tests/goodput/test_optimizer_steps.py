"""Learning rates are those of a step within it, and those of the schedule outside."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_egeria.methods.goodput.optimizer_steps import ScaledSteps


@pytest.fixture
def optimizer():
    return torch.optim.SGD([{"params": nn.Linear(2, 1).parameters(), "lr": lr} for lr in (0.1, 0.2)])


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def stepped(optimizer):
    seen = []
    optimizer.step(lambda: seen.extend(rates(optimizer)) or torch.zeros(()))
    return seen


def test_within_a_step_they_are_multiplied(optimizer):
    scaled = ScaledSteps(optimizer)
    assert stepped(optimizer) == [0.1, 0.2]
    scaled.factors = 2.0
    assert stepped(optimizer) == [0.2, 0.4]
    scaled.factors = np.array([3.0, 1.0])
    assert stepped(optimizer) == pytest.approx([0.3, 0.2])
    assert rates(optimizer) == [0.1, 0.2]
    scaled.remove()
    scaled.remove()
    assert stepped(optimizer) == [0.1, 0.2]


def test_after_an_error_in_a_step_they_return(optimizer):
    scaled = ScaledSteps(optimizer)
    scaled.factors = 2.0
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert rates(optimizer) == [0.2, 0.4]
    scaled.end()
    assert rates(optimizer) == [0.1, 0.2]


def test_a_tensor_stays_the_same_object():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=rate)
    scaled = ScaledSteps(optimizer)
    scaled.factors = 2.0
    assert [float(one) for one in stepped(optimizer)] == [1.0]
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
