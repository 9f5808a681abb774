"""A look at some samples: is loading them random, what can be left out of them, and in what do they differ?"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.samples import (
    StandIn,
    copy_of,
    digest_of,
    encode,
    is_numbers,
    leaves_of,
    same_leaf,
    with_leaves,
)

EXAMINED_SAMPLES = 4
Fetch = Callable[[list[int], list[int] | None], list[Any]]


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
        own_rows: numbers of the batch leaves in which each row is made of one sample, whatever stands beside it.
    """

    problem: str | None
    inputs: tuple[InputField, ...] = ()
    varying: tuple[VaryingField, ...] = ()
    must_load: str | None = None
    fingerprint: str = ""
    structure: Any = None
    own_rows: frozenset[int] = frozenset()


class Inspector:
    """Looks at samples.

    Args:
        dataset: of the user.
        fetch: loads samples from it, by their ids, with seeds or without.
        collate: of the user's DataLoader.
    """

    def __init__(self, dataset: Any, fetch: Fetch, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._fetch = fetch
        self._collate = collate

    def examine(self, ids: Sequence[int], seeds: Sequence[int] | None, loaded: list[Any]) -> Findings:
        """Load some samples twice, have the batch collated in several ways, and some samples field by field.

        Args:
            ids: of the samples of a batch.
            seeds: of their randomness; None leaves it as it comes.
            loaded: the samples of that batch.
        """
        with kept_random_state():
            try:
                some = list(seeds[:EXAMINED_SAMPLES]) if seeds is not None else None
                return self._findings(list(ids[:EXAMINED_SAMPLES]), some, loaded)
            except TypeError as error:
                return Findings(f"the samples cannot be compared with one another: {error}")
            except _CollateError as error:
                return Findings(f"the collate function fails when it is given a part of the batch again ({error})")

    def _findings(self, ids: list[int], seeds: list[int] | None, loaded: list[Any]) -> Findings:
        seed_all(1)
        before = random_state()
        samples = self._fetch(ids, seeds)
        drawn = not same_random_state(before, random_state())
        seed_all(2)
        again = self._fetch(ids, seeds)
        if not all(_same(a, b) for a, b in zip(samples, again, strict=True)):
            if seeds is None:
                return Findings(
                    "loading a sample twice gives two results (random augmentation?); FrozenPrefixCache("
                    "augmentation_views=4) keeps a few variants of each sample instead of ever new ones"
                )
            return Findings(
                "a sample differs although torch, numpy and random were seeded alike: the dataset has a random "
                "generator of its own, or changes"
            )
        if drawn and seeds is None:
            return Findings(
                "loading a sample draws random numbers (random augmentation?); FrozenPrefixCache(augmentation_views=4) "
                "keeps a few variants of each sample instead of ever new ones"
            )
        seed_all(1)
        before = random_state()
        batch = self._collated(loaded)
        drawn = not same_random_state(before, random_state())
        seed_all(2)
        if drawn or not _same(batch, self._collated(loaded)):
            return Findings(
                "the collate function draws random numbers (mixing or augmentation of whole batches?), so what it "
                "makes of a sample is not the same each time; draw them for each sample in the dataset, with "
                "FrozenPrefixCache(augmentation_views=4)"
            )
        return dataclasses.replace(self._look_at_fields(samples, loaded), own_rows=self._own_rows(batch, loaded))

    def _collated(self, samples: Sequence[Any]) -> list[Tensor]:
        """The tensors of the batch, made of copies: the user's function may take samples apart or work in place."""
        copies = [with_leaves(sample, map(_copy_of_any, leaves_of(sample))) for sample in samples]
        try:
            return list(tensor_leaves(self._collate(copies)))
        except Exception as error:  # the user's function may raise anything
            raise _CollateError(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error

    def _own_rows(self, batch: list[Tensor], samples: list[Any]) -> frozenset[int]:
        """Which leaves of the batch are the same, row by row, when its samples stand in reverse, or in halves."""
        count = len(samples)
        own = {number for number, leaf in enumerate(batch) if leaf.ndim and len(leaf) == count}
        for places in (range(count)[::-1], range(count // 2), range(count // 2, count)):
            if places:
                found = self._collated([samples[place] for place in places])
                own = {n for n in own if n < len(found) and _is_made_of(found[n], batch[n], places)}
        return frozenset(own)

    def _look_at_fields(self, samples: list[Any], loaded: list[Any]) -> Findings:
        """What each field of some samples does to the batch; lengths are those of all that were ``loaded``."""
        fingerprint = self._fingerprint()
        structure = structure_of(samples[0])
        if any(repr(structure_of(sample)) != repr(structure) for sample in loaded):
            return Findings(None, must_load="the samples differ in structure", fingerprint=fingerprint)
        problem = None
        for leaf in (leaf for sample in samples for leaf in leaves_of(sample)):
            try:
                encode([leaf])
            except TypeError as error:
                problem = str(error)
        batch = self._collated(samples)
        inputs, varying = [], []
        for number, leaf in enumerate(leaves_of(samples[0])):
            if not all(map(has_positions, leaf_of_each(loaded, number))):
                continue
            try:
                found = self._collated([_with_leaf(sample, number, absent) for sample in samples])
            except _CollateError:
                continue
            if [t.shape for t in found] != [t.shape for t in batch]:
                continue
            changed = [i for i, (a, b) in enumerate(zip(batch, found, strict=True)) if not same_leaf(a, b)]
            if len(changed) == 1 and problem is None:
                other_bytes = max(len(encoded_fields(sample, number) or b"") for sample in samples)
                takes_empty = not is_numbers(leaf) and self._takes_empty(samples, number, batch)
                batch_shape = tuple(batch[changed[0]].shape[1:]) if takes_empty else None
                inputs.append(InputField(number, changed[0], other_bytes, batch_shape))
            lengths = tuple(map(length_of, leaf_of_each(loaded, number)))
            if len(set(lengths)) > 1:
                varying += [VaryingField(number, batch_leaf, lengths) for batch_leaf in changed]
        reason = problem or (None if inputs else "the collate function needs all fields of the samples")
        return Findings(None, tuple(inputs), tuple(varying), reason, fingerprint, structure)

    def _takes_empty(self, samples: list[Any], number: int, batch: list[Tensor]) -> bool:
        """Whether the batch has all its other leaves, and as many samples, where a leaf of the samples is empty."""
        try:
            found = self._collated([_with_leaf(sample, number, empty) for sample in samples])
        except _CollateError:
            return False
        differing = [i for i, (a, b) in enumerate(zip(batch, found, strict=False)) if not same_leaf(a, b)]
        if (
            len(found) != len(batch)
            or len(differing) != 1
            or len({leaf.shape for leaf in leaf_of_each(samples, number)}) > 1
        ):
            return False
        one, other = batch[differing[0]], found[differing[0]]
        return one.shape[:1] == other.shape[:1] == (len(samples),) and one.dtype == other.dtype

    def _fingerprint(self) -> str:
        """Of length, classes and three samples; the same in every process."""
        digest = hashlib.blake2b(digest_size=16)
        for layer in layers_of(self._dataset):
            digest.update(f"{type(layer).__module__}.{type(layer).__qualname__};".encode())
        count = len(self._dataset)
        digest.update(str(count).encode())
        for sample_id in dict.fromkeys((0, count // 2, count - 1)):
            for leaf in leaves_of(self._fetch([sample_id], [0])[0]):
                try:
                    digest.update(encode([leaf]))
                except TypeError:
                    digest.update(type(leaf).__name__.encode())
        return digest.hexdigest()


class _CollateError(Exception):
    """Ends an examination."""


def layers_of(dataset: Any) -> Iterator[Any]:
    """The dataset, the one that it is a part of, and so on."""
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


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


def encoded_fields(sample: Any, input_leaf: int | None) -> bytes | None:
    """The encoded fields of a sample, with a stand-in for its input; behind them, a digest of that."""
    leaves: list[Any] = list(leaves_of(sample))
    try:
        if input_leaf is not None:
            leaves.append(digest_of(leaves[input_leaf]))
            leaves[input_leaf] = StandIn.of(leaves[input_leaf])
        return encode(leaves)
    except TypeError:
        return None


def _copy_of_any(leaf: Any) -> Any:
    """A copy of what could be changed in place, of the user's own types too.

    Raises:
        TypeError: it cannot be copied.
    """
    if isinstance(leaf, (Tensor, np.ndarray, list)):
        return copy_of(leaf)
    try:
        return copy.deepcopy(leaf)
    except Exception as error:  # whatever the user's own type raises
        raise TypeError(f"a value of type {type(leaf).__name__} cannot be copied") from error


def structure_of(sample: Any) -> Any:
    """The sample with None for its leaves."""
    return with_leaves(sample, itertools.repeat(None))


def _with_leaf(sample: Any, number: int, change: Callable[[Any], Any]) -> Any:
    leaves = list(leaves_of(sample))
    leaves[number] = change(leaves[number])
    return with_leaves(sample, iter(leaves))


def absent(leaf: Any) -> Any:
    """A stand-in for it."""
    return StandIn.of(leaf).leaf()


def empty(leaf: Any) -> Any:
    """One of the same type without a value."""
    return leaf.new_empty(0) if isinstance(leaf, Tensor) else np.empty(0, leaf.dtype)


def leaf_of_each(samples: list[Any], number: int) -> list[Any]:
    """One of the leaves of each sample."""
    return [list(leaves_of(sample))[number] for sample in samples]


def _same(first: Any, second: Any) -> bool:
    a, b = list(leaves_of(first)), list(leaves_of(second))
    return len(a) == len(b) and all(same_leaf(x, y) for x, y in zip(a, b, strict=True))


def _is_made_of(part: Tensor, batch: Tensor, places: Sequence[int]) -> bool:
    """Whether a leaf of some samples of a batch has their rows, or rows that are padded to another length."""
    if not part.ndim or len(part) != len(places):
        return False
    if part.shape[1:] != batch.shape[1:]:
        return len(part) < len(batch)
    return same_leaf(part, batch[list(places)])


def has_positions(leaf: Any) -> bool:
    """Whether it is a tensor or an array with a first dimension, or a list of numbers."""
    return is_numbers(leaf) or (isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0)


def length_of(leaf: Any) -> int:
    """How many positions a tensor, an array or a list has."""
    return len(leaf) if isinstance(leaf, list) else int(leaf.shape[0])
