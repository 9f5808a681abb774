"""Manifests of stores, and their folders."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.caching.store.directory import CacheDirectory
from lightning_egeria.caching.store.manifest import (
    ENTRIES,
    INDEX,
    LOCK,
    MANIFEST,
    Manifest,
    is_in_use,
    is_store_name,
    remove_store,
)
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.errors import StoreError
from support.caching.stored import manifest

NAME = "0123456789abcdef" * 2
FILES = (MANIFEST, LOCK, INDEX, ENTRIES)


@pytest.fixture
def store(tmp_path):
    opened = ActivationStore.create(tmp_path / NAME, manifest(NAME))
    yield opened
    opened.close()


@settings(max_examples=40, deadline=None)  # drawing one takes long
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


@pytest.mark.parametrize(
    "name", ["project", "web", "0123", "A" * 32, "0" * 31, "0" * 33, "g" * 32, "\u0660" * 32, "0" * 32 + "\n"]
)
def test_a_folder_with_another_name_is_no_store(name, tmp_path):
    """It has the files of one all the same: a web extension has a manifest.json, say."""
    folder = tmp_path / name
    folder.mkdir(mode=0o700)
    for file in FILES:
        (folder / file).write_text("mine")
    assert not is_store_name(name)
    assert not remove_store(folder)
    assert CacheDirectory(tmp_path).summaries() == []
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(FILES, "mine")


@pytest.mark.parametrize(
    "name", ["main.py", "manifest.json.orig", "manifest.json.1x", ".manifest.json.swp", ".git", "lock~", "entries.bak"]
)
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_deleted_beside_a_file_of_the_user(name, kind, store, tmp_path):
    """Neither by hand nor when training makes room."""
    store.close()
    if kind == "folder":
        (store.folder / name).mkdir()
    elif kind == "link":
        (store.folder / name).symlink_to(tmp_path)
    else:
        (store.folder / name).write_text("mine")
    assert not remove_store(store.folder)
    other = manifest("f" * 32)
    made, _ = CacheDirectory(tmp_path).open(other, 100, max_bytes=1, min_free_bytes=0)
    made.close()
    assert {file.name for file in store.folder.iterdir()} == {*FILES, name}


def test_an_index_takes_as_much_memory_as_was_written(tmp_path):
    """And not as much as its length says: a gibibyte, of which nothing is on the disk."""
    store = ActivationStore.create(tmp_path / NAME, manifest(NAME, entries=2**28, activation_bytes=16, field_bytes=16))
    store.close()
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from lightning_egeria.caching.store.store import ActivationStore\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; store = ActivationStore(Path(sys.argv[1]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before); store.close()"
    )
    told = subprocess.run([sys.executable, "-c", code, store.folder], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 100_000  # kB


def test_an_index_is_read_where_it_was_written(tmp_path):
    store = ActivationStore.create(tmp_path / NAME, manifest(NAME, entries=10**6))
    numbers = (0, 5, 77_777, 10**6 - 1)
    for number in numbers:
        assert store.write(number, np.ones(256, np.uint8), (64,), b"x")
    again = ActivationStore(store.folder)
    assert np.flatnonzero(again.index).tolist() == list(numbers)
    assert (again.index == store.index).all()
    for opened in (store, again):
        opened.close()
