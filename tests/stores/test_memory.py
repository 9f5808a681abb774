"""Entries in memory."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_egeria.caching.store.memory import MemoryTier, chosen
from lightning_egeria.caching.store.rows import RowForm
from support.caching.stored import CPU


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_memory_keeps_the_first_that_fit():
    form = RowForm.of(torch.empty(1, 4))
    tier = MemoryTier(3 * form.row_bytes, form, 100, CPU)
    tier.put(np.array([5, 6]), torch.tensor([[5.0] * 4, [6.0] * 4]))
    tier.put(np.array([6, 7, 8]), torch.tensor([[0.0] * 4, [7.0] * 4, [8.0] * 4]))
    assert tier.holds(np.array([5, 6, 7, 8])).tolist() == [True, True, True, False]
    assert tier.take(np.array([7, 5, 6]))[:, 0].tolist() == [7, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_rows_are_chosen_and_kept_without_torch(dtype, shape):
    """In the threads beside training, torch would start threads of its own."""
    rows = torch.randn(6, *shape).to(dtype)
    kept = np.array([0, 2, 3])
    wanted = rows[torch.from_numpy(kept)]
    tier = MemoryTier(10**4, RowForm.of(rows), 10, CPU)
    with Operations() as seen:
        some = chosen(rows, kept)
        tier.put(np.array([9, 2, 4]), some)
        taken = tier.take(np.array([4, 9]))
    assert seen.names.isdisjoint({"index", "index_put_", "index_select", "copy_", "clone", "cat", "stack"})
    assert torch.equal(some, wanted)
    assert torch.equal(taken, wanted[[2, 0]])
