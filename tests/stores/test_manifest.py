"""Manifests of stores, and their folders."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import manifest

from lightning_egeria.stores.manifest import Manifest, StoreError, is_in_use, remove_store
from lightning_egeria.stores.store import ActivationStore


@pytest.fixture
def store(tmp_path):
    opened = ActivationStore.create(tmp_path / "store", manifest())
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
