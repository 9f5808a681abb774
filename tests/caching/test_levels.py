"""Batches of one boundary in and out of a store and of memory."""

import numpy as np
import pytest
import torch
from stored import CPU, level_of, new_level, whole_fields, write
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_egeria.caching.levels import MemoryTier, chosen, stamps_of
from lightning_egeria.stores.rows import RowForm
from lightning_egeria.stores.store import ActivationStore

BATCHES = {
    "vectors": torch.randn(4, 6),
    "channels last": torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
    "numbers": torch.randn(4),
    "bfloat16": torch.randn(4, 2).to(torch.bfloat16),
    "transposed": torch.randn(4, 5, 6).transpose(1, 2),
    "empty": torch.randn(4, 0),
}


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def level(tmp_path):
    opened = new_level(tmp_path / "store", RowForm.of(torch.empty(1, 4)))
    yield opened
    opened.store.close()


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("host_bytes", [0, 100, 10**6])
def test_rows_come_back_with_their_strides(tmp_path, batch, host_bytes):
    form = RowForm.of(batch)
    level = new_level(tmp_path / "store", form, host_bytes=host_bytes)
    entries = np.array([7, 2, 9, 4])
    assert level.write(entries, form.to_memory(batch), (whole_fields(b""),) * 4) == 4
    for _ in range(2):
        rows, sound, *_ = level.read(entries[::-1].copy(), pin=False)
        back = form.from_memory(rows)
        assert sound.all()
        assert back.equal(batch.flip(0))
        assert back.stride() == batch.stride()
    assert level.present(np.arange(10)).tolist() == [n in entries for n in range(10)]
    level.store.close()


def test_missing_entries_are_left_out(level):
    write(level, [3, 5], torch.arange(8.0).view(2, 4))
    rows, sound, *_ = level.read(np.array([5, 1, 3]), pin=False)
    assert sound.tolist() == [True, False, True]
    assert rows[:, 0].tolist() == [4, 0]


def test_entry_is_written_once(level):
    assert write(level, [1], torch.zeros(1, 4)) == 1
    assert write(level, [1, 2], torch.ones(2, 4)) == 1
    assert level.read(np.array([1, 2]), pin=False)[0][:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("host_bytes", [0, 10**6])
def test_forgotten_entries_are_misses(tmp_path, host_bytes):
    level = new_level(tmp_path / "store", RowForm.of(torch.empty(1, 4)), host_bytes=host_bytes)
    write(level, [1, 2], torch.zeros(2, 4))
    level.forget(np.array([1]))
    assert level.read(np.array([1, 2]), pin=False)[1].tolist() == [False, True]
    assert level.verified[[1, 2]].tolist() == [False, True]
    level.store.close()


def test_verified_entry_that_another_run_rewrote_is_a_miss(level):
    """It stands for another sample now."""
    write(level, [1], torch.zeros(1, 4), b"one")
    other = level_of(ActivationStore(level.store.folder), level.form)
    other.forget(np.array([1]))
    write(other, [1], torch.ones(1, 4), b"two")
    level.store.refresh()
    assert level.read(np.array([1]), pin=False)[1].tolist() == [False]
    other.store.close()


def test_stamps_are_known_after_reading(level):
    write(level, [1], torch.zeros(1, 4), b"one")
    other = level_of(ActivationStore(level.store.folder), level.form)
    assert not other.stamps.any()
    other.read(np.array([1]), pin=False)
    assert other.stamps[1].tolist() == level.stamps[1].tolist() == list(stamps_of(whole_fields(b"one")))
    assert not other.verified.any()
    other.store.close()


def test_memory_keeps_the_first_that_fit():
    form = RowForm.of(torch.empty(1, 4))
    tier = MemoryTier(3 * form.row_bytes, form, 100, CPU)
    tier.put(np.array([5, 6]), torch.tensor([[5.0] * 4, [6.0] * 4]))
    tier.put(np.array([6, 7, 8]), torch.tensor([[0.0] * 4, [7.0] * 4, [8.0] * 4]))
    assert tier.holds(np.array([5, 6, 7, 8])).tolist() == [True, True, True, False]
    assert tier.take(np.array([7, 5, 6]), 1)[:, 0].tolist() == [7, 5, 6]


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
        taken = tier.take(np.array([4, 9]), 1)
    assert seen.names.isdisjoint({"index", "index_put_", "index_select", "copy_", "clone", "cat", "stack"})
    assert torch.equal(some, wanted)
    assert torch.equal(taken, wanted[[2, 0]])


def test_a_million_entries_take_little_memory(tmp_path):
    entries = 10**6
    level = new_level(tmp_path / "store", RowForm.of(torch.empty(1, 64)), entries, host_bytes=10**5)
    taken = level.store.index.nbytes + level.host.index_bytes + level.stamps.nbytes + level.verified.nbytes
    assert taken < 32 * entries
    assert sum(file.stat().st_blocks for file in level.store.folder.iterdir()) * 512 < 10**6  # sparse
    level.store.close()
