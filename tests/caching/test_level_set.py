"""The cached boundaries of one loader."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stored import CPU, write

from lightning_egeria.caching.level_set import LevelSet, form_length
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.errors import StoreError
from lightning_egeria.stores.directory import CacheDirectory
from lightning_egeria.stores.limits import Budget, Limits
from lightning_egeria.stores.manifest import Manifest
from lightning_egeria.training.notices import Notices


@pytest.fixture
def levels(tmp_path):
    released = []
    room = Limits(max_bytes=10**9, min_free_bytes=0, host=Budget(10**6), device_bytes=0)
    made = LevelSet(CacheDirectory(tmp_path), room, CacheStats(), Notices("cache"), lambda: released.append(1))
    yield made
    made.close(remove=True)
    assert released
    assert list(tmp_path.iterdir()) == []


def origin(depth, entries):
    def manifest(form, field_bytes):
        return Manifest(f"{depth:032x}", entries, form.row_bytes, field_bytes, "torch.float32", form.order, {})

    front = SimpleNamespace(depth=depth, device=CPU, units=[SimpleNamespace(path="net.2")])
    return SimpleNamespace(manifest=manifest, front=front)


def opened(levels, depth, entries=10):
    text = levels.open(origin(depth, entries), torch.empty(1, 4), ragged=False, field_bytes=64, key=depth)
    assert re.fullmatch(
        rf"the outputs of 'net.2' will take about 0.00 GB in .* \({entries} entries of 16 bytes\)", text
    )
    return levels.at(depth)


def test_levels_are_found_by_depth_and_folder(levels):
    first, second = opened(levels, 1), opened(levels, 3)
    assert levels.all == [first, second] == list(levels)
    assert levels.at(3) is levels.of(second.store.folder) is second
    assert levels.at(2) is levels.of(first.store.folder / "x") is None


def test_only_the_deepest_keeps_rows_in_memory(levels):
    first = opened(levels, 1)
    second = opened(levels, 2)
    assert (first.host.capacity, second.host.capacity) == (0, 10)


def test_loaders_share_the_memory_of_the_host(levels, tmp_path):
    room = Limits(max_bytes=10**9, min_free_bytes=0, host=Budget(200), device_bytes=0)
    one, other = (
        LevelSet(CacheDirectory(tmp_path), room, CacheStats(), Notices("cache"), lambda: None) for _ in range(2)
    )
    capacities = [opened(one, 1).host.capacity, opened(other, 2).host.capacity, opened(one, 3).host.capacity]
    assert capacities == [10, 2, 10]
    assert room.host.free == 0
    one.close(remove=True)
    other.close(remove=True)
    opened(levels, 1)


def test_a_replaced_level_is_dropped_with_the_next_epoch(levels):
    first, second = opened(levels, 1), opened(levels, 2)
    write(first, [1, 2], torch.zeros(2, 4))
    write(second, [1], torch.zeros(1, 4))
    levels.begin_epoch()
    assert levels.all == [first, second]
    write(second, [2], torch.zeros(1, 4))
    levels.begin_epoch()
    assert levels.all == [second]
    assert not first.store.folder.exists()


def test_entries_are_compared_again(levels):
    level = opened(levels, 1)
    write(level, [1, 2, 3], torch.zeros(3, 4))
    levels.forget_verified(np.array([2]), 0)
    assert np.flatnonzero(level.verified).tolist() == [1, 3]
    levels.forget_verified(None, 0)
    assert not level.verified.any()


def test_a_store_too_large_is_refused(levels):
    with pytest.raises(StoreError, match="more than a store can hold"):
        opened(levels, 1, entries=2**40)


def test_progress_ends_with_the_last_entry(levels, monkeypatch):
    monkeypatch.setattr("lightning_egeria.caching.level_set.COUNT_EVERY_S", -1.0)
    assert levels.progress_text() is None
    level = opened(levels, 1)
    write(level, range(5), torch.zeros(5, 4))
    assert levels.progress_text() == "50%"
    write(level, range(10), torch.zeros(10, 4))
    assert levels.progress_text() is None


def test_forms_have_room_for_longer_batches():
    assert [form_length(length) for length in (1, 32, 33, 100)] == [64, 64, 128, 256]
