"""Stores on disk."""

import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_egeria.caching.store.manifest import (
    ENTRIES,
    INDEX,
    LOCK,
    MANIFEST,
    read_manifest,
)
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.errors import StoreError
from support.caching.stored import manifest


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


def test_the_first_of_two_manifests_counts(store, monkeypatch):
    """Two processes make a store at once, and neither has seen a manifest."""
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(StoreError, match="entries of another form"):
        ActivationStore.create(store.folder, manifest(activation_bytes=128))
    assert read_manifest(store.folder).activation_bytes == 256
    assert sorted(file.name for file in store.folder.iterdir()) == sorted((MANIFEST, ENTRIES, INDEX, LOCK))


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
