"""Random numbers by a key."""

import torch

from lightning_egeria.methods.pipelining.seeding import seeded


def test_seeded_numbers_repeat_and_leave_the_others():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with seeded(1, 2):
        first = torch.rand(1)
    with seeded(1, 2):
        assert torch.equal(first, torch.rand(1))
    assert torch.equal(expected, torch.rand(1))
