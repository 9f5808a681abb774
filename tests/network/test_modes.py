"""Layers that compute something else in evaluation mode."""

import pytest
from torch import nn

from lightning_egeria.core.network.modes import drops, looks_at_its_mode


class StochasticDepth(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x if self.training else x * self.p


class Block(nn.Module):
    """Drops in a layer inside."""

    def __init__(self):
        super().__init__()
        self.attention_dropout = 0.1
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("module", "does"),
    [
        (nn.Dropout2d(0.5), True),
        (nn.Dropout(0.0), False),
        (StochasticDepth(0.2), True),
        (StochasticDepth(0.0), False),
        (Block(), True),
        (nn.Linear(2, 2), False),
    ],
)
def test_drops(module, does):
    assert drops(module) == does


@pytest.mark.parametrize(
    ("module", "does"),
    [(StochasticDepth(0.0), True), (Block(), False), (nn.BatchNorm1d(2), False), (nn.RReLU(), True)],
)
def test_looks_at_its_mode(module, does):
    assert looks_at_its_mode(module) == does
