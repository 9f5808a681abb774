"""What is loaded of a batch, and what comes back from the loading side."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_egeria.caching.record.tensors import LazyTensor
from lightning_egeria.core.batches.tree import change_leaves
from lightning_egeria.core.batches.worker_calls import Worker


class Mode(enum.Enum):
    """How a batch is loaded."""

    PLAIN = "plain"  # as without the cache
    PROBE = "probe"  # whole, and each tensor of a sample is followed
    FOLLOWED = "followed"  # inputs of frozen modules are followed, and left out for samples whose fields are stored


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to load for one batch.

    Attributes:
        number: number of the batch, counted over the whole fit.
        ids: sample ids, in the order of the batch.
        mode: how to load it.
        entries: number of the entry of each sample.
        seeds: seed of the randomness of each sample; None leaves it as it comes.
        inputs: numbers of the tensors of a sample that frozen modules read.
        structure: structure of a sample.
        stores: folders with the fields of samples.
        stored: for each sample, number of the store that holds its fields; -1 loads it.
        stamps: digest of the fields that each entry must have.
        version: number of the set of frozen modules that it was planned for.
        checks: places of samples whose entries are compared with what the frozen modules compute.
        doubts: as in `CachedValues`, when it was planned.
        keeps: whether the samples come with the batch.
    """

    number: int
    ids: tuple[Any, ...]
    mode: Mode = Mode.PLAIN
    entries: tuple[int, ...] = ()
    seeds: tuple[int, ...] | None = None
    inputs: tuple[int, ...] = ()
    structure: Any = None
    stores: tuple[Path, ...] = ()
    stored: tuple[int, ...] = ()
    stamps: tuple[int, ...] = ()
    version: int = 0
    checks: tuple[int, ...] = ()
    doubts: int = 0
    keeps: bool = False


class Kept(NamedTuple):
    """Samples as the collate function got them, by their positions in the batch.

    Attributes:
        loaded: samples that were loaded.
        stored: leaves of those that came from a store, without their inputs.
    """

    loaded: dict[int, Any]
    stored: dict[int, list[Any]]

    @staticmethod
    def joined(parts: Iterable[tuple[Kept | None, Sequence[int]]]) -> Kept | None:
        """Return the samples at some positions of several batches, in order; None if one batch has kept none.

        >>> Kept.joined([(Kept({0: "a"}, {1: ["b"]}), [1, 0]), (Kept({2: "c"}, {}), [2])])
        Kept(loaded={1: 'a', 2: 'c'}, stored={0: ['b']})
        """
        found, at = Kept({}, {}), itertools.count()
        for kept, positions in parts:
            if kept is None:
                return None
            for position in positions:
                if position in kept.stored:
                    found.stored[next(at)] = kept.stored[position]
                else:
                    found.loaded[next(at)] = kept.loaded[position]
        return found


@dataclasses.dataclass
class Loaded:
    """A batch, and what is known of its samples.

    Attributes:
        batch: the batch that the user's collate function made.
        plan: its plan, with the mode that it was really loaded in.
        lazy: whether each sample came from a store, without its inputs.
        fields: encoded fields of each sample that was loaded; None for one that cannot be encoded.
        workers: worker process that has loaded each sample; None for this process.
        structure: structure of the samples; None if they differ.
        drew: what loading the samples drew from or changed: a global random generator, or an attribute of the dataset.
        varies: whether most samples are others if they are loaded again; looked at in a probe only.
        differ: whether samples differ in their structure, so that the batch has none.
        together: whether the dataset makes batches of them, so that samples have no entries.
        kept: the samples; None if they are not wanted.
        loading: seconds that the dataset took.
        recording: seconds in which samples were digested.
        took: seconds that all of it took, in the process that has loaded it.
    """

    batch: Any
    plan: Plan
    lazy: tuple[bool, ...] = ()
    fields: tuple[bytes | None, ...] = ()
    workers: tuple[Worker | None, ...] = ()
    structure: Any = None
    drew: str | None = None
    varies: bool = False
    differ: bool = False
    together: bool = False
    kept: Kept | None = None
    loading: float = 0.0
    recording: float = 0.0
    took: float = 0.0

    def pin_memory(self, device: Any = None) -> Loaded:
        """Pin all tensors that are there, as the DataLoader asks."""
        self.batch = change_leaves(self.batch, Tensor, _pinned)
        return self


def _pinned(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LazyTensor):
        return tensor.pin_memory()
    if tensor.is_known:
        tensor.node.value = tensor.node.compute().pin_memory()
    return tensor
