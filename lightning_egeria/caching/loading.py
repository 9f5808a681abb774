"""Loading one batch as planned: samples that are on disk already come without what only the frozen prefix reads.

This side runs where the user's DataLoader runs it: in its worker processes, or in the training process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_egeria.caching.samples import (
    StandIn,
    copy_of,
    decode,
    encode,
    is_numbers,
    leaves_of,
    same_leaf,
    with_leaves,
)
from lightning_egeria.caching.store import ActivationStore, StoreError
from lightning_egeria.tracing import tensor_leaves

EXAMINED_SAMPLES = 4
KEPT_FIELDS_OVERHEAD = 500  # bytes of a sample's fields in memory, beside the fields themselves


@dataclasses.dataclass(frozen=True)
class InputField:
    """A field of the samples that can be left out without changing the rest of the batch.

    Attributes:
        sample_leaf: its number among the leaves of a sample.
        batch_leaf: number among the tensors of the batch.
        other_bytes: of all other fields, encoded, of the largest sample seen.
        batch_shape: of the batch leaf without its first dimension, where the collate function also takes fields without
            a single value in its place; None: it does not.
    """

    sample_leaf: int
    batch_leaf: int
    other_bytes: int
    batch_shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class VaryingField:
    """A field whose first dimension differs from sample to sample, and that the collate function pads.

    Attributes:
        sample_leaf: its number among the leaves of a sample.
        batch_leaf: number among the tensors of the batch, ``[samples, positions, ...]``.
        lengths: positions of each sample of the batch.
    """

    sample_leaf: int
    batch_leaf: int
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a look at some samples has shown.

    Attributes:
        problem: why nothing can be cached; None if it can.
        inputs: the fields that need not be loaded if only the prefix reads them.
        varying: the fields that differ in length.
        must_load: why all fields have to be loaded; None if those of ``inputs`` need not.
        fingerprint: of the data, in hexadecimal.
        structure: a sample with None for its leaves.
    """

    problem: str | None
    inputs: tuple[InputField, ...] = ()
    varying: tuple[VaryingField, ...] = ()
    must_load: str | None = None
    fingerprint: str = ""
    structure: Any = None


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
    """

    batch: Any
    number: int
    loaded: tuple[bool, ...]
    fields: tuple[bytes | None, ...] | None
    lengths: tuple[int, ...] | None
    input_shape: tuple[int, ...] | None
    findings: Findings | None


class PlannedDataset:
    """The user's dataset and collate function behind plans. Reads of other attributes go to the dataset.

    Args:
        dataset: map-style, of the user.
        collate: of the user's DataLoader.
        memory_bytes: how much of the fields of samples may be kept in memory. Only of use in the training process.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], memory_bytes: int = 0) -> None:
        self.dataset = dataset
        self.collate = collate
        self._memory_bytes = memory_bytes
        self._known: dict[tuple[Path, int], tuple[bytes, list[Any]]] = {}
        self._known_bytes = 0
        self._stores: dict[Path, ActivationStore | None] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stores": {}, "_known": {}, "_memory_bytes": 0}

    def __getitems__(self, plan: Plan) -> Loaded:
        samples, fields, loaded = self._samples(plan)
        findings = self._examine(plan, samples) if plan.examine else None
        lengths = None
        if plan.length_leaf is not None:
            lengths = tuple(map(_length_of, _at(samples, plan.length_leaf)))
        field, input_shape = plan.input_field, None
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

    def _samples(self, plan: Plan) -> tuple[list[Any], tuple[bytes | None, ...] | None, tuple[bool, ...]]:
        stored, leaves = self._stored(plan)
        samples: dict[int, Any] = {}
        field = plan.input_field
        if field is not None:
            # Nothing of the absent input is needed if it is absent from the whole batch.
            empty = field.batch_shape is not None and len(leaves) == len(plan.ids)
            for place, values in leaves.items():
                if empty:
                    values[field.sample_leaf] = _empty(values[field.sample_leaf])
                samples[place] = with_leaves(plan.structure, iter(values))
        missing = [place for place in range(len(plan.ids)) if place not in samples]
        seeds = [plan.seeds[place] for place in missing] if plan.seeds is not None else None
        samples.update(zip(missing, self._fetch([plan.ids[place] for place in missing], seeds), strict=True))
        loaded = tuple(place not in stored for place in range(len(plan.ids)))
        ordered = [samples[place] for place in range(len(plan.ids))]
        if not plan.keep:
            return ordered, None, loaded
        left_out = plan.input_field.sample_leaf if plan.input_field is not None else None
        kept = [stored.get(place) or _fields_of(sample, left_out) for place, sample in enumerate(ordered)]
        return ordered, tuple(kept), loaded

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
                    values = decode(fields)
                    if len(values) == count:
                        stored[place], leaves[place] = fields, values
                        self._keep(key, fields)
        return stored, leaves

    def _keep(self, key: tuple[Path, int], fields: bytes) -> None:
        self._known_bytes += len(fields) + KEPT_FIELDS_OVERHEAD
        if self._known_bytes <= self._memory_bytes:
            self._known[key] = fields, decode(fields)

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

    def _examine(self, plan: Plan, loaded: list[Any]) -> Findings:
        with kept_random_state():
            try:
                return self._findings(plan, loaded)
            except TypeError as error:
                return Findings(f"the samples cannot be compared with one another: {error}")

    def _findings(self, plan: Plan, loaded: list[Any]) -> Findings:
        ids = list(plan.ids[:EXAMINED_SAMPLES])
        seeds = list(plan.seeds[:EXAMINED_SAMPLES]) if plan.seeds is not None else None
        seed_all(1)
        before = random_state()
        samples = self._fetch(ids, seeds)
        drawn = not same_random_state(before, random_state())
        seed_all(2)
        again = self._fetch(ids, seeds)
        if not all(_same(a, b) for a, b in zip(samples, again, strict=True)):
            if plan.seeds is None:
                return Findings(
                    "loading a sample twice gives two results (random augmentation?); FrozenPrefixCache("
                    "augmentation_views=4) keeps a few variants of each sample instead of ever new ones"
                )
            return Findings(
                "a sample differs although torch, numpy and random were seeded alike: the dataset has a random "
                "generator of its own, or changes"
            )
        if drawn and plan.seeds is None:
            return Findings(
                "loading a sample draws random numbers (random augmentation?); FrozenPrefixCache(augmentation_views=4) "
                "keeps a few variants of each sample instead of ever new ones"
            )
        return self._look_at_fields(samples, loaded)

    def _look_at_fields(self, samples: list[Any], loaded: list[Any]) -> Findings:
        """What each field of some samples does to the batch; lengths are those of all that were ``loaded``."""
        fingerprint = self._fingerprint()
        structure = with_leaves(samples[0], iter(lambda: None, 0))
        if any(repr(with_leaves(sample, iter(lambda: None, 0))) != repr(structure) for sample in loaded):
            return Findings(None, must_load="the samples differ in structure", fingerprint=fingerprint)
        problem = None
        for leaf in (leaf for sample in samples for leaf in leaves_of(sample)):
            try:
                encode([leaf])
            except TypeError as error:
                problem = str(error)
        batch = list(tensor_leaves(self.collate(samples)))
        inputs, varying = [], []
        for number, leaf in enumerate(leaves_of(samples[0])):
            if not (is_numbers(leaf) or (isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim)):
                continue
            try:
                found = list(tensor_leaves(self.collate([_with_leaf(sample, number, _absent) for sample in samples])))
            except Exception:  # the user's function may raise anything
                continue
            if [t.shape for t in found] != [t.shape for t in batch]:
                continue
            changed = [i for i, (a, b) in enumerate(zip(batch, found, strict=True)) if not same_leaf(a, b)]
            if len(changed) == 1 and problem is None:
                other_bytes = max(len(_fields_of(sample, number) or b"") for sample in samples)
                batch_shape = tuple(batch[changed[0]].shape[1:]) if self._takes_empty(samples, number, batch) else None
                inputs.append(InputField(number, changed[0], other_bytes, batch_shape))
            lengths = tuple(map(_length_of, _at(loaded, number)))
            if len(set(lengths)) > 1:
                varying += [VaryingField(number, batch_leaf, lengths) for batch_leaf in changed]
        reason = problem or (None if inputs else "the collate function needs all fields of the samples")
        return Findings(None, tuple(inputs), tuple(varying), reason, fingerprint, structure)

    def _takes_empty(self, samples: list[Any], number: int, batch: list[Tensor]) -> bool:
        """Whether the batch has all its other leaves, and as many samples, where a leaf of the samples is empty."""
        try:
            found = list(tensor_leaves(self.collate([_with_leaf(sample, number, _empty) for sample in samples])))
        except Exception:  # the user's function may raise anything
            return False
        differing = [i for i, (a, b) in enumerate(zip(batch, found, strict=False)) if not same_leaf(a, b)]
        if len(found) != len(batch) or len(differing) != 1 or len({leaf.shape for leaf in _at(samples, number)}) > 1:
            return False
        one, other = batch[differing[0]], found[differing[0]]
        return one.shape[:1] == other.shape[:1] == (len(samples),) and one.dtype == other.dtype

    def _fingerprint(self) -> str:
        """Of length, classes and three samples; the same in every process."""
        digest = hashlib.blake2b(digest_size=16)
        layer = self.dataset
        while layer is not None:
            digest.update(f"{type(layer).__module__}.{type(layer).__qualname__};".encode())
            layer = getattr(layer, "dataset", None)
        count = len(self.dataset)
        digest.update(str(count).encode())
        for sample_id in dict.fromkeys((0, count // 2, count - 1)):
            for leaf in leaves_of(self._fetch([sample_id], [0])[0]):
                try:
                    digest.update(encode([leaf]))
                except TypeError:
                    digest.update(type(leaf).__name__.encode())
        return digest.hexdigest()


def as_it_is(loaded: Loaded) -> Loaded:
    """The collate function of a planned DataLoader: `PlannedDataset` has called the user's already."""
    return loaded


def seed_all(seed: int) -> None:
    """Seed the generators that datasets draw from: of torch (on the CPU), numpy and `random`."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what datasets draw from
    random.seed(seed)


def random_state() -> tuple[Any, ...]:
    """Of torch (on the CPU), numpy and `random`."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def same_random_state(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn in between."""
    arrays = np.array_equal(first[1][1], second[1][1]) and first[1][2:] == second[1][2:]
    return bool(torch.equal(first[0], second[0]) and arrays and first[2] == second[2])


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Random numbers that are drawn inside are not missing afterwards."""
    before = random_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def replace_leaf(batch: Any, number: int, new: Tensor) -> Any:
    """The batch with another tensor in the place of tensor ``number``."""
    count = iter(range(10**9))
    return apply_to_collection(batch, Tensor, lambda leaf: new if next(count) == number else leaf, allow_frozen=True)


def _without_leaf(batch: Any, number: int) -> tuple[Any, tuple[int, ...]]:
    """A stand-in takes no memory until it is sent to another process."""
    shape = tuple(list(tensor_leaves(batch))[number].shape)
    dtype = list(tensor_leaves(batch))[number].dtype
    return replace_leaf(batch, number, torch.empty(0, dtype=dtype)), shape


def _fields_of(sample: Any, input_leaf: int | None) -> bytes | None:
    """The encoded fields of a sample, with a stand-in for its input."""
    leaves: list[Any] = list(leaves_of(sample))
    if input_leaf is not None:
        leaves[input_leaf] = StandIn.of(leaves[input_leaf])
    try:
        return encode(leaves)
    except TypeError:
        return None


def _with_leaf(sample: Any, number: int, change: Callable[[Any], Any]) -> Any:
    leaves = list(leaves_of(sample))
    leaves[number] = change(leaves[number])
    return with_leaves(sample, iter(leaves))


def _absent(leaf: Any) -> Any:
    return StandIn.of(leaf).leaf()


def _empty(leaf: Any) -> Any:
    """One of the same type without a value."""
    return leaf.new_empty(0) if isinstance(leaf, Tensor) else np.empty(0, leaf.dtype)


def _at(samples: list[Any], number: int) -> list[Any]:
    return [list(leaves_of(sample))[number] for sample in samples]


def _same(first: Any, second: Any) -> bool:
    a, b = list(leaves_of(first)), list(leaves_of(second))
    return len(a) == len(b) and all(same_leaf(x, y) for x, y in zip(a, b, strict=True))


def _length_of(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, list) else int(leaf.shape[0])
