"""Loading one batch as planned: samples that are on disk already come without what only the frozen prefix reads.

This side runs where the user's DataLoader runs it: in its worker processes, or in the training process.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.findings import (
    Findings,
    InputField,
    Inspector,
    empty,
    encoded_fields,
    has_positions,
    kept_random_state,
    leaf_of_each,
    length_of,
    seed_all,
    structure_of,
)
from lightning_egeria.caching.samples import copy_of, decode, leaves_of, with_leaves
from lightning_egeria.caching.store import ActivationStore, StoreError

KEPT_FIELDS_OVERHEAD = 500  # bytes of a sample's fields in memory, beside the fields themselves


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to load for one batch.

    Attributes:
        number: of the batch, counted over the whole fit.
        ids: sample ids, in the order of the batch.
        version: of the prefix that it was planned for.
        entries: number of each sample's entry.
        stores: folders of stores.
        stored: for each sample, number of the store that holds its fields; -1: load it.
        seeds: of each sample's randomness; None leaves it as it comes.
        input_field: the field that only the prefix reads.
        structure: of a sample.
        length_leaf: number of the leaf, among those of a sample, that tells its length; None: all are alike.
        keep: encode the fields of the samples, for writing them.
        examine: look at the samples themselves.
    """

    number: int
    ids: tuple[int, ...]
    version: int = 0
    entries: tuple[int, ...] = ()
    stores: tuple[Path, ...] = ()
    stored: tuple[int, ...] = ()
    seeds: tuple[int, ...] | None = None
    input_field: InputField | None = None
    structure: Any = None
    length_leaf: int | None = None
    keep: bool = False
    examine: bool = False


class Loaded(NamedTuple):
    """A batch, and what its plan came to.

    Attributes:
        batch: as the user's collate function made it; without the input if no sample of it was loaded.
        number: of its plan.
        loaded: whether each sample was loaded, with its input.
        fields: encoded fields of each sample, if the plan wants them; None where they cannot be.
        lengths: of the samples, if the plan asks for them.
        input_shape: shape of the input that is missing from ``batch``; None if it is there.
        findings: if the plan wants them.
        odd: a sample is None, say because its file cannot be read, or of another structure than that of the plan: what
            the collate function makes of the whole batch is its own affair, and every sample was loaded.
    """

    batch: Any
    number: int
    loaded: tuple[bool, ...]
    fields: tuple[bytes | None, ...] | None
    lengths: tuple[int, ...] | None
    input_shape: tuple[int, ...] | None
    findings: Findings | None
    odd: bool = False


def is_own(wrapper: Any, name: str, wrapped: str) -> bool:
    """Whether an attribute is to be set on the wrapper itself; all that is set before ``wrapped`` is its own."""
    return wrapped not in vars(wrapper) or name in vars(wrapper) or hasattr(type(wrapper), name)


class PlannedDataset:
    """The user's dataset and collate function behind plans. Reads and writes of other attributes go to the dataset.

    Args:
        dataset: map-style, of the user.
        collate: of the user's DataLoader.
        memory_bytes: how much of the fields of samples may be kept in memory. Only of use in the training process.

    Attributes:
        changes: how often an attribute of the dataset was set to something else.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], memory_bytes: int = 0) -> None:
        self.collate = collate
        self.changes = 0
        self._memory_bytes = memory_bytes
        self._known: dict[tuple[Path, int], tuple[bytes, list[Any]]] = {}
        self._known_bytes = 0
        self._stores: dict[Path, ActivationStore | None] = {}
        self.dataset = dataset  # last, see `is_own`

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if is_own(self, name, "dataset"):
            super().__setattr__(name, value)
        else:
            self.changes += getattr(self.dataset, name, self) is not value
            setattr(self.dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stores": {}, "_known": {}, "_memory_bytes": 0}

    def __getitems__(self, plan: Plan) -> Loaded:
        samples, stored = self._samples(plan)
        loaded = tuple(place not in stored for place in range(len(samples)))
        if _are_odd([sample for sample, new in zip(samples, loaded, strict=True) if new], plan):
            if not all(loaded):
                samples = self._fetch(list(plan.ids), list(plan.seeds) if plan.seeds is not None else None)
            every = (True,) * len(samples)
            return Loaded(self.collate(samples), plan.number, every, None, None, None, None, odd=True)
        findings = lengths = None
        if plan.examine:
            inspector = Inspector(self.dataset, self._fetch, self.collate)
            findings = inspector.examine(plan.ids, plan.seeds, samples)
        if plan.length_leaf is not None:
            lengths = tuple(map(length_of, leaf_of_each(samples, plan.length_leaf)))
        field, input_shape = plan.input_field, None
        left_out = field.sample_leaf if field is not None else None
        fields = None
        if plan.keep:  # before the user's function, which may change the samples
            fields = tuple(stored.get(place) or encoded_fields(one, left_out) for place, one in enumerate(samples))
        if field is None or any(loaded):
            batch = self.collate(samples)
        elif field.batch_shape is None:
            batch, input_shape = _without_leaf(self.collate(samples), field.batch_leaf)
        else:
            batch, input_shape = self.collate(samples), (len(samples), *field.batch_shape)
        return Loaded(batch, plan.number, loaded, fields, lengths, input_shape, findings)

    def close(self) -> None:
        """Close the stores that were read. Safe to call twice."""
        for store in self._stores.values():
            if store is not None:
                store.close()
        self._stores = {}
        self._known.clear()
        self._known_bytes = 0

    def _samples(self, plan: Plan) -> tuple[list[Any], dict[int, bytes]]:
        """The samples, and the encoded fields of those that were not loaded, by place."""
        stored, leaves = self._stored(plan)
        samples: dict[int, Any] = {}
        field = plan.input_field
        if field is not None:
            # Nothing of the absent input is needed if it is absent from the whole batch.
            all_stored = field.batch_shape is not None and len(leaves) == len(plan.ids)
            for place, values in leaves.items():
                if all_stored:
                    values[field.sample_leaf] = empty(values[field.sample_leaf])
                samples[place] = with_leaves(plan.structure, iter(values))
        missing = [place for place in range(len(plan.ids)) if place not in samples]
        seeds = [plan.seeds[place] for place in missing] if plan.seeds is not None else None
        samples.update(zip(missing, self._fetch([plan.ids[place] for place in missing], seeds), strict=True))
        return [samples[place] for place in range(len(plan.ids))], stored

    def _stored(self, plan: Plan) -> tuple[dict[int, bytes], dict[int, list[Any]]]:
        """Encoded fields and leaves of the samples that need not be loaded, by place."""
        stored: dict[int, bytes] = {}
        leaves: dict[int, list[Any]] = {}
        count = len(list(leaves_of(plan.structure)))
        if self._stores.keys() - set(plan.stores):  # dropped since
            self.close()
        for place, number in enumerate(plan.stored) if plan.input_field is not None else ():
            if number < 0:
                continue
            key = (plan.stores[number], plan.entries[place])
            if key in self._known:
                stored[place], values = self._known[key]
                leaves[place] = [copy_of(leaf) for leaf in values]  # the user's function may change them
                continue
            fields = self._fields(*key)
            if fields is not None:
                with contextlib.suppress(ValueError):  # damaged: loaded like any other
                    *values, _ = decode(fields)  # without the digest of what is not there
                    if len(values) == count:
                        stored[place], leaves[place] = fields, values
                        self._keep(key, fields)
        return stored, leaves

    def _keep(self, key: tuple[Path, int], fields: bytes) -> None:
        self._known_bytes += len(fields) + KEPT_FIELDS_OVERHEAD
        if self._known_bytes <= self._memory_bytes:
            self._known[key] = fields, decode(fields)[:-1]

    def _fetch(self, ids: list[int], seeds: list[int] | None) -> list[Any]:
        if not ids:
            return []
        if seeds is not None:
            samples = []
            with kept_random_state():
                for sample_id, seed in zip(ids, seeds, strict=True):
                    seed_all(seed)
                    samples.append(self.dataset[sample_id])
            return samples
        several = getattr(self.dataset, "__getitems__", None)
        if several is not None:
            return list(several(ids))
        return [self.dataset[sample_id] for sample_id in ids]

    def _fields(self, folder: Path, entry: int) -> bytes | None:
        if folder not in self._stores:
            try:
                self._stores[folder] = ActivationStore(folder)
            except StoreError:  # removed since; the samples are loaded
                self._stores[folder] = None
        store = self._stores[folder]
        return store.read_fields(entry) if store is not None else None


def _are_odd(samples: list[Any], plan: Plan) -> bool:
    """Whether one of some samples that were loaded is not what the plan takes it for."""
    if any(sample is None for sample in samples):
        return True
    leaves = [plan.input_field.sample_leaf] if plan.input_field is not None else []
    leaves += [plan.length_leaf] if plan.length_leaf is not None else []
    if not leaves:
        return False
    wanted = repr(plan.structure)
    return any(repr(structure_of(sample)) != wanted for sample in samples) or not all(
        has_positions(leaf) for number in leaves for leaf in leaf_of_each(samples, number)
    )


def as_it_is(loaded: Loaded) -> Loaded:
    """The collate function of a planned DataLoader: `PlannedDataset` has called the user's already."""
    return loaded


def replace_leaf(batch: Any, number: int, new: Tensor) -> Any:
    """The batch with another tensor in the place of tensor ``number``."""
    count = iter(range(10**9))
    return apply_to_collection(batch, Tensor, lambda leaf: new if next(count) == number else leaf, allow_frozen=True)


def _without_leaf(batch: Any, number: int) -> tuple[Any, tuple[int, ...]]:
    """A stand-in takes no memory until it is sent to another process."""
    shape = tuple(list(tensor_leaves(batch))[number].shape)
    dtype = list(tensor_leaves(batch))[number].dtype
    return replace_leaf(batch, number, torch.empty(0, dtype=dtype)), shape
