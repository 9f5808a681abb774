"""Stores and the tiers of memory before them."""

import fcntl
import json
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.levels import Level, MemoryTier, Pieces, RowForm, pieces_of
from lightning_egeria.caching.store import (
    ENTRIES,
    INDEX,
    LOCK,
    MANIFEST,
    ActivationStore,
    Manifest,
    StoreError,
    is_in_use,
    read_manifest,
    remove_store,
)
from lightning_egeria.errors import CacheError


def manifest(name="store", entries=10, activation_bytes=256, field_bytes=64):
    return Manifest(name, entries, activation_bytes, field_bytes, "torch.float32", (0, 1), {"model": "Net"})


@pytest.fixture
def store(tmp_path):
    opened = ActivationStore.create(tmp_path / "store", manifest())
    yield opened
    opened.close()


def row(value, count=64):
    return torch.full((count,), float(value)).numpy().view(np.uint8)


def test_entries_come_back(store):
    for number in (0, 9, 4):
        assert store.write(number, row(number), (8, 8), f"fields of {number}".encode()) > 0
    into = np.empty(256, np.uint8)
    for number in (9, 4, 0):
        assert store.read(number, into) == (8, 8)
        assert np.array_equal(into, row(number))
        assert store.read_fields(number) == f"fields of {number}".encode()
    assert store.read(5, into) is None
    assert store.read_fields(5) is None


def test_what_is_larger_than_a_slot_is_not_written(store):
    assert store.write(1, row(1, 65), (65,), b"") == 0
    assert store.write(1, row(1), (64,), b"x" * 65) == 0
    assert store.read(1, np.empty(256, np.uint8)) is None


def test_what_is_forgotten_is_gone_for_others_too(store):
    store.write(1, row(1), (64,), b"")
    store.forget(1)
    other = ActivationStore(store.folder)
    assert other.read(1, np.empty(256, np.uint8)) is None
    other.close()


def test_another_process_sees_what_is_written(store):
    other = ActivationStore(store.folder)
    store.write(3, row(3), (64,), b"x")
    assert other.index[3] == 0
    assert other.read_fields(3) == b"x"  # before its index was read again
    store.write(4, row(4), (64,), b"y")
    other.refresh()
    assert other.index[4] != 0
    other.close()


def test_a_store_of_another_form_is_refused(store):
    with pytest.raises(StoreError, match="entries of another form"):
        ActivationStore.create(store.folder, manifest(activation_bytes=128))


@pytest.mark.parametrize("sizes", [{"activation_bytes": 128}, {"activation_bytes": 512, "field_bytes": 256}])
def test_a_store_with_longer_or_shorter_slots_is_used_as_it_is(store, sizes):
    store.write(3, row(3), (64,), b"x")
    directory = CacheDirectory(store.folder.parent)
    other, _ = directory.open(manifest(**sizes), 100, 10**9, 0)
    assert other.read_fields(3) == b"x"
    assert other.manifest.activation_bytes == 256
    other.close()


def test_the_first_of_two_manifests_counts(store, monkeypatch):
    """Two processes make a store at once, and neither has seen a manifest."""
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(StoreError, match="entries of another form"):
        ActivationStore.create(store.folder, manifest(activation_bytes=128))
    assert read_manifest(store.folder).activation_bytes == 256
    assert sorted(file.name for file in store.folder.iterdir()) == sorted((MANIFEST, ENTRIES, INDEX, LOCK))


def test_who_looks_whether_a_store_is_in_use_keeps_nobody_out(store):
    """Looking locks a store for a moment."""
    store.write(3, row(3), (64,), b"x")
    store.close()
    with (store.folder / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        letting_go = threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        letting_go.start()
        other, _ = CacheDirectory(store.folder.parent).open(manifest(), 100, 10**9, 0)
        letting_go.join()
    assert other.read_fields(3) == b"x"
    other.close()


def test_a_store_that_is_locked_is_not_deleted(store, monkeypatch):
    monkeypatch.setattr("lightning_egeria.caching.store.LOCK_PATIENCE_S", 0.01)
    store.close()
    with (store.folder / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="is locked by another process"):
            CacheDirectory(store.folder.parent).open(manifest(), 100, 10**9, 0)
    assert (store.folder / ENTRIES).exists()


def test_files_are_private(store):
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in store.folder.iterdir() if file.suffix != ".json"} == {
        0
    }


def test_a_link_in_the_place_of_a_file_is_not_followed(store, tmp_path):
    store.close()
    (tmp_path / "other").write_bytes(bytes(40))
    (store.folder / INDEX).unlink()
    (store.folder / INDEX).symlink_to(tmp_path / "other")
    with pytest.raises(StoreError):
        ActivationStore(store.folder)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.dictionaries(st.text(), c)))
def test_any_json_is_a_manifest_or_a_store_error(value):
    try:
        Manifest.from_json(json.dumps(value))
    except StoreError:
        return
    raise AssertionError(value)


@given(st.sampled_from(["entries", "activation_bytes", "field_bytes", "order", "about", "dtype"]), st.data())
def test_a_changed_manifest_is_one_or_a_store_error(key, data):
    state = json.loads(manifest().to_json())
    state[key] = data.draw(st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2))
    try:
        found = Manifest.from_json(json.dumps(state))
    except StoreError:
        return
    assert found.slot_bytes > 0


def test_an_open_store_is_not_removed(store):
    assert is_in_use(store.folder)
    assert not remove_store(store.folder)
    store.close()
    assert not is_in_use(store.folder)
    assert remove_store(store.folder)
    assert not store.folder.exists()


def test_a_million_entries_take_little_memory(tmp_path):
    entries = 10**6
    store = ActivationStore.create(tmp_path / "store", manifest(entries=entries))
    form = RowForm.of(torch.empty(2, 64))
    tiers = [MemoryTier(10**5, form, entries, torch.device("cpu")) for _ in range(2)]
    assert store.index.nbytes + sum(tier.index_bytes for tier in tiers) < 16 * entries
    assert sum(file.stat().st_blocks for file in store.folder.iterdir()) * 512 < 10**6  # sparse
    store.close()


def test_the_oldest_stores_make_room(tmp_path):
    directory = CacheDirectory(tmp_path / "cache")
    for age, name in enumerate(("new", "old", "open")):
        store = ActivationStore.create(directory.path / name, manifest(name, activation_bytes=4096))
        for number in range(10):
            store.write(number, row(1, 1024), (1024,), b"")
        store.close()
        for file in [*store.folder.iterdir(), store.folder]:
            os.utime(file, (1000 - 100 * age, 1000 - 100 * age))
    held = ActivationStore(directory.path / "open")
    taken = sum(summary.bytes_on_disk for summary in directory.summaries())
    wanted = manifest("wanted")
    store, room = directory.open(wanted, 1000, max_bytes=taken, min_free_bytes=0)
    assert {folder.name for folder in directory.path.iterdir()} == {"new", "open", "wanted"}
    assert 1000 < room < taken
    store.close()
    held.close()


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="belongs to another user"):
        CacheDirectory(tmp_path)


FORMS = [
    torch.randn(4, 6, 5),
    torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
    torch.randn(4),
    torch.randn(4, 2).to(torch.bfloat16),
    torch.randn(4, 5, 6).transpose(1, 2),
]


@pytest.mark.parametrize("batch", FORMS)
@pytest.mark.parametrize("host_bytes", [0, 100, 10**6])
def test_a_level_gives_back_what_it_was_given(tmp_path, batch, host_bytes):
    form = RowForm.of(batch)
    order = tuple(form.order)
    described = Manifest("store", 10, form.piece_bytes, 8, str(form.dtype), order, {})
    cpu = torch.device("cpu")
    tiers = (MemoryTier(host_bytes, form, 10, cpu), MemoryTier(0, form, 10, cpu))
    level = Level(1, form, ActivationStore.create(tmp_path / "store", described), *tiers)
    entries = np.array([7, 2, 9, 4])
    assert level.write(entries, pieces_of(form, batch, None), (b"",) * 4) == 4
    for _ in range(2):
        rows, sound = level.read(entries[::-1].copy(), pin=False)
        back = rows.batch(form, None, cpu)
        assert sound.all()
        assert back.equal(batch.flip(0))
        assert back.stride() == batch.stride()
    assert level.present(np.arange(10)).tolist() == [n in entries for n in range(10)]
    level.store.close()


@pytest.mark.parametrize("host_bytes", [0, 200, 10**6])
def test_ragged_rows_come_back_padded(tmp_path, host_bytes):
    batch = torch.randn(4, 6, 5)
    lengths = [3, 6, 1, 4]
    form = RowForm.of(batch, ragged=True)
    described = Manifest("store", 10, 6 * form.piece_bytes, 8, str(form.dtype), form.order, {})
    cpu = torch.device("cpu")
    tiers = (MemoryTier(host_bytes, form, 10, cpu), MemoryTier(0, form, 10, cpu))
    level = Level(1, form, ActivationStore.create(tmp_path / "store", described), *tiers)
    entries = np.array([7, 2, 9, 4])
    level.write(entries, pieces_of(form, batch, lengths), (b"",) * 4)
    for _ in range(2):
        rows, sound = level.read(np.array([4, 1, 7, 2]), pin=False)
        assert sound.tolist() == [True, False, True, True]
        back = rows.batch(form, 8, cpu)
        assert back.shape == (3, 8, 5)
        for found, number in zip(back, (3, 0, 1), strict=True):
            assert found[: lengths[number]].equal(batch[number, : lengths[number]])
            assert not found[lengths[number] :].any()
    with pytest.raises(ValueError, match="longer than its batch"):
        rows.batch(form, 5, cpu)
    level.store.close()


def test_a_tier_keeps_the_first_that_fit():
    form = RowForm.of(torch.empty(1, 4))
    tier = MemoryTier(3 * form.piece_bytes, form, 100, torch.device("cpu"))
    tier.put(np.array([5, 6]), Pieces(torch.tensor([[5.0] * 4, [6.0] * 4]), None))
    tier.put(np.array([6, 7, 8]), Pieces(torch.tensor([[0.0] * 4, [7.0] * 4, [8.0] * 4]), None))
    assert tier.holds(np.array([5, 6, 7, 8])).tolist() == [True, True, True, False]
    assert tier.take(np.array([7, 5, 6])).data[:, 0].tolist() == [7, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("piece", [(), (3,), (2, 5), (0, 4)])
def test_rows_are_chosen_and_kept_without_torch(monkeypatch, dtype, piece):
    """In the threads beside training, torch would start threads of its own."""
    rows = torch.randn(6, *piece).to(dtype)
    kept = np.array([True, False, True, True, False, False])
    wanted = rows[torch.from_numpy(kept)]
    form = RowForm(piece, False, tuple(range(len(piece) + 1)), dtype)
    tier = MemoryTier(10**4, form, 10, torch.device("cpu"))
    for name in ("__getitem__", "__setitem__", "index_select", "copy_", "clone"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"torch.Tensor.{name}"))
    chosen = Pieces(rows, None).select(kept)
    tier.put(np.array([9, 2, 4]), chosen)
    taken = tier.take(np.array([4, 9]))
    monkeypatch.undo()
    assert torch.equal(chosen.data, wanted)
    assert torch.equal(taken.data, wanted[[2, 0]])
