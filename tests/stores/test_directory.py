"""The folder of stores."""

import fcntl
import os
import threading

import numpy as np
import pytest
import torch

from lightning_egeria.caching.store.directory import CacheDirectory, default_cache_dir
from lightning_egeria.caching.store.manifest import ENTRIES, LOCK, Manifest
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.errors import CacheError, StoreError


def manifest(name="store", entries=10, activation_bytes=256, field_bytes=64):
    return Manifest(name, entries, activation_bytes, field_bytes, "torch.float32", (0, 1), {"model": "Net"})


@pytest.fixture
def store(tmp_path):
    opened = ActivationStore.create(tmp_path / "store", manifest())
    yield opened
    opened.close()


def row(value, count=64):
    return torch.full((count,), float(value)).numpy().view(np.uint8)


@pytest.mark.parametrize("sizes", [{"activation_bytes": 128}, {"activation_bytes": 512, "field_bytes": 256}])
def test_store_with_other_slots_is_used_as_it_is(store, sizes):
    store.write(3, row(3), (64,), b"x")
    directory = CacheDirectory(store.folder.parent)
    other, _ = directory.open(manifest(**sizes), 100, 10**9, 0)
    assert other.read_fields(3) == b"x"
    assert other.manifest.activation_bytes == 256
    other.close()


def test_looking_at_a_store_keeps_nobody_out(store):
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
    monkeypatch.setattr("lightning_egeria.caching.store.manifest.LOCK_PATIENCE_S", 0.01)
    store.close()
    with (store.folder / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="is locked by another process"):
            CacheDirectory(store.folder.parent).open(manifest(), 100, 10**9, 0)
    assert (store.folder / ENTRIES).exists()


def test_the_oldest_stores_make_room(tmp_path):
    directory = CacheDirectory(tmp_path / "cache")
    for age, name in enumerate(("aa" * 16, "bb" * 16, "cc" * 16)):
        store = ActivationStore.create(directory.path / name, manifest(name, activation_bytes=4096))
        for number in range(10):
            store.write(number, row(1, 1024), (1024,), b"")
        store.close()
        for file in [*store.folder.iterdir(), store.folder]:
            os.utime(file, (1000 - 100 * age, 1000 - 100 * age))
    held = ActivationStore(directory.path / ("cc" * 16))
    taken = sum(summary.bytes_on_disk for summary in directory.summaries())
    wanted = manifest("dd" * 16)
    store, room = directory.open(wanted, 1000, max_bytes=taken, min_free_bytes=0)
    assert {folder.name for folder in directory.path.iterdir()} == {"aa" * 16, "cc" * 16, "dd" * 16}
    assert 1000 < room < taken
    store.close()
    held.close()


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="belongs to another user"):
        CacheDirectory(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("attack", ["link", "link above", "folder"])
def test_what_another_user_has_laid_is_refused(attack, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    path = {"link": tmp_path / "link", "link above": tmp_path / "link" / "cache"}.get(attack, tmp_path / "mine")
    os.chown(tmp_path / ("mine" if attack == "folder" else "link"), 12345, 12345, follow_symlinks=False)
    with pytest.raises(CacheError, match="belongs to another user"):
        CacheDirectory(path)


def test_a_folder_above_that_everyone_can_write_to(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match="everyone may write to this folder above it"):
        CacheDirectory(tmp_path / "cache")
    tmp_path.chmod(0o1777)
    CacheDirectory(tmp_path / "cache")


@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_it_and_its_parents_are_private_whatever_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        CacheDirectory(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2


def test_default_directory_is_in_the_cache_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lightning_egeria"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.write_text(""), "cannot be made"),
        (lambda path: path.mkdir() or path.chmod(0o777), "others may write to it.*`chmod 700` it"),
        (lambda path: path.symlink_to(path.parent / "nowhere" / "at all"), "cannot be made"),
    ],
    ids=["file", "writable by all", "link to nowhere"],
)
def test_directory_that_cannot_be_used(tmp_path, prepare, message):
    prepare(tmp_path / "cache")
    with pytest.raises(CacheError, match=message):
        CacheDirectory(tmp_path / "cache")


def test_directory_must_be_there_to_be_looked_at(tmp_path):
    with pytest.raises(CacheError, match="cannot be read"):
        CacheDirectory(tmp_path / "cache", make=False)
    assert CacheDirectory(tmp_path / "made" / "with parents").summaries() == []
    assert (tmp_path / "made" / "with parents").stat().st_mode & 0o077 == 0
