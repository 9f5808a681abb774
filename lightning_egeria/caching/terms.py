"""On what terms cached activations stand for the frozen prefix."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_egeria.caching.arguments import GivenInput, OtherArguments
from lightning_egeria.caching.findings import InputField
from lightning_egeria.caching.made import MadeArguments


@dataclasses.dataclass
class Terms:
    """What the examination has found.

    Attributes:
        inputs: arguments of the network that come from the batch.
        made: those that the training step makes, and that the frozen front reads.
        others: all its other arguments.
        input_field: the field that need not be loaded; None: all are.
        input_order: dimensions of its tensor in the batch, from the slowest to the fastest in memory.
        structure: of a sample.
        length_leaf: leaf of a sample that tells its length; None: the activations of all samples are alike in shape.
        length_batch_leaf: leaf of the batch whose second dimension is the length that samples are padded to.
        exact: whether a sample gives the same bits wherever it is in a batch.
        sizes: of batches that were seen to give the same bits.
        first_size: of the batch that was examined.
        single: whether the prefix can be run by itself for some samples of a batch.
        compiled: whether the network is; what the examination saw is then not what runs.
        may_change: whether a hook of the user may change a batch on its way to the training step.
    """

    inputs: list[GivenInput]
    made: MadeArguments
    others: OtherArguments
    input_field: InputField | None
    input_order: tuple[int, ...]
    structure: Any
    length_leaf: int | None
    length_batch_leaf: int | None
    exact: bool
    sizes: set[int]
    first_size: int
    single: bool
    compiled: bool
    may_change: bool
    refused_sizes: set[int] = dataclasses.field(default_factory=set)

    @property
    def copies_input(self) -> bool:
        """Whether the network is given a copy of the input that need not be loaded."""
        field = self.input_field
        return field is not None and any(g.leaf == field.batch_leaf and g.layout is None for g in self.inputs)

    def is_proven(self, size: int) -> bool:
        """Whether a sample's activation is the same in batches of this size."""
        return not self.exact or size in self.sizes

    def size_for(self, count: int, samples: int) -> int:
        """In how large a batch to run ``count`` samples of one of ``samples``."""
        return min((s for s in self.sizes if s >= count), default=samples) if self.exact else count

    def try_size(self, size: int, same: bool) -> None:
        """A batch of this size ran whole."""
        if size not in self.refused_sizes:
            (self.sizes if same else self.refused_sizes).add(size)
