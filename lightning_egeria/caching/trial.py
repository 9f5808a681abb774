"""Whether the output at a boundary is, row by row, a function of the samples: tried on one batch, then cached."""

from __future__ import annotations

import uuid

import torch
from torch import Tensor

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front
from lightning_egeria.caching.level_set import LevelSet, Origin
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.outputs import BatchSizes, is_rounding
from lightning_egeria.caching.planner import Planner
from lightning_egeria.errors import CacheError
from lightning_egeria.lazy.meta import version_of
from lightning_egeria.lazy.outside import Outside, has_samples
from lightning_egeria.lazy.replay import replay
from lightning_egeria.lazy.tape import Node
from lightning_egeria.snapshots.digests import same_bits
from lightning_egeria.snapshots.random_state import RandomState, preserved_random_state
from lightning_egeria.stores.samples import without_inputs

RENEWALS = 2  # times that another state of the front is waited for
TRIALS = 10  # batches that may show nothing, before the cache stops
FIELD_SLACK = 2  # encoded fields may be so many times as long as the longest of the first batch


def try_boundary(node: Node, value: Tensor) -> tuple[str | None, bool]:
    """Run the recorded computation again with the samples in another order.

    A row that keeps its place must not change with the other rows of the batch, bit for bit, whatever the precision. A
    row at another place may differ by rounding.

    Args:
        node: boundary activation of a batch, with all rows loaded.
        value: the activation as the network computed it, ``[samples, ...]``.

    Returns:
        Why it cannot be cached, or None; and whether rows are the same bits at each place in the batch.
    """
    size = node.tape.size
    leaves = node.leaves()
    if value.ndim == 0 or value.shape[0] != size:
        return f"its shape {tuple(value.shape)} does not begin with the {size} samples of the batch", False
    if not any(leaf.row is not None for leaf in leaves) and not any(map(has_samples, leaves)):
        return "it depends on no tensor of the batch", False
    if any(leaf.row is None and leaf.value is not None and leaf.version != version_of(leaf.value) for leaf in leaves):
        return "the frozen layers change their input in place", False
    with preserved_random_state(), torch.no_grad():
        before = RandomState.current()
        if not same_bits(replay(node, range(size)), value):
            return "the same input gave another output (is it random, or does it depend on earlier batches?)", False
        if RandomState.current() != before:
            return "the frozen layers draw random numbers", False
        if size == 1:
            return None, True
        for kept in (0, 1):
            # All others are one and the same sample, so that a mean over the batch, say, becomes another one.
            for other in (1 - kept, (size // 2) | 1 - kept):
                mixed = replay(node, [place if place % 2 == kept else other % size for place in range(size)])
                if mixed is None:
                    return "its computation fits only these samples (are they padded one by one?)", False
                if not same_bits(mixed[kept::2], value[kept::2]):
                    return "the output of one sample depends on the other samples of its batch", False
        turned = [(turn, replay(node, [(place + turn) % size for place in range(size)])) for turn in _spread(size)]
    exact = True
    for turn, moved in turned:
        if moved is None:
            return "its computation does not repeat", False
        exact = exact and same_bits(moved.roll(turn, 0), value)
        if not exact and not is_rounding(moved.roll(turn, 0), value):
            return "the output of a sample depends on its place in the batch", False
    return None, exact


def smaller_sizes(node: Node, value: Tensor) -> list[int]:
    """Return the sizes of smaller batches that have the same bits: halves, quarters and eighths that were tried."""
    size, found = node.tape.size, []
    with preserved_random_state(), torch.no_grad():
        for smaller in dict.fromkeys(-(-size // share) for share in (8, 4, 2)):
            tries = [[(start + place) % size for place in range(smaller)] for start in _spread(size)]
            if 1 < smaller < size and all(same_bits(replay(node, places), value[places]) for places in tries):
                found.append(smaller)
    return found


class Trials:
    """Tries the deepest boundary on whole batches until one shows whether it can be cached, and opens its level.

    Args:
        name: ``"training"`` or the name of a validation loader, for the store.
        dataset: the user's dataset, asked for planned batches.
        planner: plans whole batches for trials; learns what a trial found.
        levels: the cached boundaries.
        outside: tensors of the program.
        views: variants of each sample to cache.
        seed: seed of the views.

    Attributes:
        exact: whether the rows of the boundary have the same bits at each place in the batch.
        only_here: whether entries are of use in this run only.
    """

    def __init__(
        self,
        name: str,
        dataset: PlannedDataset,
        planner: Planner,
        levels: LevelSet,
        outside: Outside,
        views: int,
        seed: int,
    ) -> None:
        self._name, self._dataset, self._planner, self._levels = name, dataset, planner, levels
        self._outside, self._views, self._seed = outside, views, seed
        self.only_here = False
        self.begin_front()

    def begin_front(self) -> None:
        """Another front is frozen, or the same with other weights."""
        self.exact, self._without_result = True, 0

    @property
    def has_outgrown(self) -> bool:
        """Whether the dataset has more samples now than there is room for in a store."""
        return any(len(level.stamps) < len(self._dataset) * max(1, self._views) for level in self._levels.all)

    def shows_nothing(self, reason: str) -> None:
        """A whole batch showed nothing; another one is tried.

        Raises:
            CacheError: too many of them showed nothing.
        """
        self._without_result += 1
        self._planner.trial_planned = False
        if self._without_result >= TRIALS:
            raise CacheError(reason)

    def open(self, batch: CachedBatch, node: Node, value: Tensor, front: Front) -> str | None:
        """Try the boundary on a whole batch, and open its level; return what it will take, in words, if it did.

        The inputs of the front are known then, and are left out of the fields of the batch.

        Args:
            batch: the batch.
            node: its boundary activation, with all rows loaded.
            value: the activation, ``[samples, ...]``.
            front: the frozen front.

        Raises:
            CacheError: the boundary cannot be cached.
            StoreError: there is no place for its entries.
        """
        if len(batch.fields) != batch.samples:
            self.shows_nothing("samples differ in their structure")
            return None
        if not front.state.is_same():
            what = "weights, buffers or attributes of the frozen layers"
            self.shows_nothing(f"{what} change (by themselves, or swapped, as averages of weights are?)")
            if self._name == "training" and front.renewals < RENEWALS:  # for validation, weights may be swapped
                front.renew()  # once, perhaps: clipped after the freeze, say
            return None
        with front.state.preserved():
            problem, self.exact = try_boundary(node, value)
            smaller = smaller_sizes(node, value) if problem is None and self.exact else []
        if problem is not None:
            text = f"at {front.units[-1].path!r}, {problem}"
            outside = any(leaf.row is None and has_samples(leaf) for leaf in node.leaves())
            if not outside or batch.samples not in value.shape[1:]:
                raise CacheError(text)
            # A tensor of the program with that length, position embeddings say, passes for rows of the batch.
            self.shows_nothing(f"{text} (or another dimension is as large as the batch: try another batch size)")
            return None
        ragged = self._outside.is_padded(node)
        if self._outside.stamps(node, ragged) is None:
            self.shows_nothing("samples differ in their structure")
            return None
        planner = self._planner
        planner.inputs = tuple(sorted({leaf.row[1] for leaf in node.leaves() if leaf.row is not None}))
        planner.structure = batch.loaded.structure
        # Texts are small, and an entry may be too short for its next batch.
        planner.leaves_out = planner.leaves_out and not ragged
        fields = [without_inputs(one, planner.inputs) if one is not None else None for one in batch.fields]
        batch.fields, longest = tuple(fields), max((len(one) for one in fields if one is not None), default=0)
        origin = self._origin(node, front)
        text = self._levels.open(origin, value, ragged, max(64, FIELD_SLACK * longest), node.key)
        planner.sizes = BatchSizes(batch.samples, smaller)
        return text

    def _origin(self, node: Node, front: Front) -> Origin:
        only_here = self.only_here or self._planner.has_own_ids or self._outside.has_tables
        return Origin(
            self._name,
            type(self._dataset.dataset),
            len(self._dataset),
            self._planner.structure,
            self._views,
            self._seed,
            uuid.uuid4().hex if only_here else "",
            node.tape.keys.describe(node.key),
            node.tape.size,
            front,
        )


def _spread(size: int) -> list[int]:
    """Some places of a batch; all of a small one, where a few values could agree by chance."""
    return list(range(size)) if size <= 16 else [1, 2, size // 2, size - 1]
