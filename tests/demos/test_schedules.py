import pytest
import torch

from lightning_egeria.demos.schedules import step_decay
from lightning_egeria.errors import ArgumentError


@pytest.mark.parametrize("milestones", [(0.75, 0.5), (0.5, 0.5), (0.0, 0.5), (0.5, 1.0)])
def test_milestones_are_ascending_shares(milestones):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ArgumentError, match="milestones must be ascending shares"):
        step_decay(optimizer, 8, milestones)
