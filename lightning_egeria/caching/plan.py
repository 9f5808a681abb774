"""What is loaded of a batch, and what comes back from the loading side."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_egeria.batches.tree import change_leaves
from lightning_egeria.lazy.tensors import LazyTensor


class Mode(enum.Enum):
    """How a batch is loaded."""

    PLAIN = "plain"  # as without the cache
    TRIAL = "trial"  # whole, and each tensor of a sample is followed
    FOLLOWED = "followed"  # the inputs of the front are followed, and left out for samples whose fields are stored


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to load for one batch.

    Attributes:
        number: number of the batch, counted over the whole fit.
        ids: sample ids, in the order of the batch.
        mode: how to load it.
        entries: number of the entry of each sample.
        seeds: seed of the randomness of each sample; None leaves it as it comes.
        inputs: numbers of the tensors of a sample that only the front reads.
        structure: structure of a sample.
        stores: folders with the fields of samples.
        stored: for each sample, number of the store that holds its fields; -1 loads it.
        stamps: digest of the fields that each entry must have.
        front: number of the front that it was planned for.
        checks: places of samples whose entries are compared with what the front computes.
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
    front: int = 0
    checks: tuple[int, ...] = ()


@dataclasses.dataclass
class Loaded:
    """A batch, and what is known of its samples.

    Attributes:
        batch: the batch that the user's collate function made.
        plan: its plan, with the mode that it was really loaded in.
        lazy: whether each sample came from a store, without its inputs.
        fields: encoded fields of each sample that was loaded; None for one that cannot be encoded.
        structure: structure of the samples; None if they differ.
        drew: what loading the samples drew from or changed: a global random generator, or an attribute of the dataset.
        differ: whether samples differ in their structure, so that the batch has none.
    """

    batch: Any
    plan: Plan
    lazy: tuple[bool, ...] = ()
    fields: tuple[bytes | None, ...] = ()
    structure: Any = None
    drew: str | None = None
    differ: bool = False

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
