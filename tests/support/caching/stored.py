"""Cached values with stores, and leaves as texts."""

import numpy as np
import torch

from lightning_egeria.caching.entries import BatchSizes, CachedValue
from lightning_egeria.caching.store.manifest import Manifest
from lightning_egeria.caching.store.memory import MemoryTier
from lightning_egeria.caching.store.rows import RowForm
from lightning_egeria.caching.store.samples import STAMP_BYTES, bytes_of
from lightning_egeria.caching.store.store import ActivationStore

CPU = torch.device("cpu")


def new_level(folder, form, entries=10, host_bytes=0, field_bytes=64, key=0):
    """A cached value whose store is in ``folder``, made if it is not there."""
    manifest = Manifest(folder.name, entries, form.row_bytes, field_bytes, str(form.dtype), form.order, {})
    return level_of(ActivationStore.create(folder, manifest), form, host_bytes, key)


def level_of(store, form, host_bytes=0, key=0):
    entries = store.manifest.entries
    tiers = MemoryTier(host_bytes, form, entries, CPU), MemoryTier(0, form, entries, CPU)
    known = np.zeros((entries, 2), np.uint64), np.zeros(entries, bool)
    return CachedValue(key, form.shape, frozenset({"backbone"}), form, store, *tiers, *known, BatchSizes(8))


def whole_fields(fields, made=0):
    """The fields of an entry, behind the stamp of what the program made."""
    return made.to_bytes(STAMP_BYTES, "little") + fields


def write(level, numbers, batch, fields=b"sample"):
    """Write the rows of a batch."""
    rows = RowForm.of(batch).to_memory(batch)
    return level.write(np.array(numbers), rows, tuple(whole_fields(fields) for _ in numbers))


def bits(leaf):
    """The leaf as text: equal texts, equal values, types and bits."""
    if isinstance(leaf, torch.Tensor):
        return f"tensor {leaf.dtype} {tuple(leaf.shape)} {bytes_of(leaf).hex()}"
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{type(leaf).__name__} {leaf.dtype} {leaf.shape} {leaf.tobytes().hex()}"
    return repr(leaf)


def manifest(name="store", entries=10, activation_bytes=256, field_bytes=64):
    return Manifest(name, entries, activation_bytes, field_bytes, "torch.float32", (0, 1), {"model": "Net"})
