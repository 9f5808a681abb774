"""Outputs of the front: being read, of some samples, still in memory, the same to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.levels import Found, Level
from lightning_egeria.lazy.meta import version_of
from lightning_egeria.lazy.outside import Outside
from lightning_egeria.lazy.tape import Node
from lightning_egeria.snapshots.digests import same_bits
from lightning_egeria.snapshots.frozen_state import FrozenState
from lightning_egeria.stores.rows import LARGEST_STEP, RowForm, Rows, laid_out

ROUNDING = 32  # last bits by which a row may differ at another place in the batch
UNPROVEN_STEP = 2**-8  # share of the largest value by which it may in a batch of a size whose bits nobody has compared
Made = npt.NDArray[np.uint64]

AGREEING = 2  # batches of another size with the bits of the entries, before it is used


class BatchSizes:
    """Sizes of batches whose rows have the same bits as those that entries were computed in."""

    def __init__(self, size: int | None = None, smaller: Sequence[int] = ()) -> None:
        self._verdicts = dict.fromkeys([*smaller, *([size] if size is not None else [])], True)
        self._agreed: dict[int, int] = {}
        self._smaller = list(smaller)

    def verdict(self, size: int) -> bool | None:
        """Whether rows of this size have the same bits; None if nobody knows yet."""
        return self._verdicts.get(size)

    def size_for(self, count: int, size: int) -> int:
        """Return a size to compute some rows in, with the same bits as in a batch of ``size``."""
        return min((one for one in self._smaller if count <= one < size), default=size)

    def compared(self, size: int, same: bool) -> bool | None:
        """A batch of a size without verdict had the same bits as its entries, or not; return the verdict."""
        self._agreed[size] = self._agreed.get(size, 0) + 1
        if not same or self._agreed[size] >= AGREEING:
            self._verdicts[size] = same
        return self._verdicts.get(size)


class Read(NamedTuple):
    """Rows of a level that are being read, for some samples of a plan or, by ``rows``, for some rows of the batch."""

    level: Level
    places: Rows
    future: Future[Found]
    rows: Rows | None = None

    def in_order(self, order: list[int]) -> Read:
        """Return the read of some samples of a plan, for the rows of a batch in another order."""
        at = {position: number for number, position in enumerate(self.places.tolist())}
        places = [row for row, position in enumerate(order) if position in at]
        rows = [at[order[row]] for row in places]
        return Read(self.level, np.array(places, np.int64), self.future, np.array(rows, np.int64))

    def of_all(self, samples: int, length: int) -> Tensor | None:
        """Return the rows of a batch of so many samples, of a length if they are ragged; None if one is missing."""
        data, sound, _, lengths = self.future.result()
        chosen = np.arange(len(sound)) if self.rows is None else self.rows
        if len(self.places) != samples or not sound.all():
            return None
        if not self.level.padded.serves(lengths[chosen], length).all():
            return None
        data = data if self.rows is None else data[torch.from_numpy(chosen)]
        form = self.level.form
        return form.from_memory(data[:, :length].contiguous() if form.ragged else data)


class Some(NamedTuple):
    """Some samples of a batch.

    Attributes:
        places: of their rows.
        start: an earlier boundary whose entries their output was computed from; None: it was their inputs.
        rows: these entries, ``[places, ...]``, of a ragged level as long as all of them are.
    """

    places: Rows
    start: Node | None = None
    rows: Tensor | None = None


class Output(NamedTuple):
    """What the program got at the deepest boundary.

    Attributes:
        value: ``[rows, ...]``.
        version: its version counter then.
        key: of the computation.
        made: digest of what the program made of each row: ``[rows]``.
        state: of the front.
    """

    value: Tensor
    version: int
    key: int
    made: Made
    state: FrozenState

    @staticmethod
    def joined(parts: Sequence[tuple[Output | None, Rows]]) -> Output | None:
        """Return some rows of several outputs; None if one is not there, or was changed in place."""
        known = [(output, rows) for output, rows in parts if output is not None]
        if len(known) < len(parts) or any(one.version != version_of(one.value) for one, _ in known):
            return None
        first, _ = known[0]
        if any((one.value.shape[1:], one.key) != (first.value.shape[1:], first.key) for one, _ in known):
            return None
        if any(one.state is not first.state for one, _ in known):
            return None
        value = torch.cat([one.value[torch.from_numpy(rows).to(one.value.device)] for one, rows in known])
        made = np.concatenate([one.made[rows] for one, rows in known])
        return Output(value, version_of(value), first.key, made, first.state)

    def is_of(self, node: Node, made: Made | None, state: FrozenState) -> bool:
        """Whether it is the value of a node, of whose rows the program has made the same."""
        if made is None or self.state is not state or self.key != node.key:
            return False
        return self.value.shape == node.meta.shape and np.array_equal(self.made, made)


def is_rounding(first: Tensor, second: Tensor, step: float | None = None) -> bool:
    """Whether two tensors of one shape differ by a few last bits, or a share, of their largest value at most."""
    if first.shape != second.shape or not first.dtype.is_floating_point:
        return False
    largest = second.abs().amax().double()
    most = largest * (ROUNDING * torch.finfo(first.dtype).eps if step is None else step)
    return bool((first.double() - second.double()).abs().amax() <= most)


def agree(form: RowForm, known: Tensor, found: Tensor, proven: bool, precision: torch.dtype) -> bool:
    """Whether rows of entries are what was computed again, to rounding.

    Args:
        form: of the entries.
        known: rows of entries, ``[samples, ...]``.
        found: the same, computed again.
        proven: whether it was computed in a batch of a size whose rows have the same bits. Of texts, which may have
            had other padding, the bits may differ all the same.
        precision: in which both were computed, such as that of autocast.
    """
    found = form.rounded(found)
    step = ROUNDING * torch.finfo(precision).eps if precision.is_floating_point else 0.0
    step = max(step, LARGEST_STEP if form.rounds else 0.0, 0.0 if proven and not form.ragged else UNPROVEN_STEP)
    return same_bits(known, found) or is_rounding(known, found, step)


def computed_at(outside: Outside, level: Level, node: Node, some: Some, length: int, size: int) -> Tensor | None:
    """Compute the output of some samples of a batch at the boundary of a level; None if that is not possible.

    Args:
        outside: tensors of the program.
        level: the level.
        node: boundary activation of the batch.
        some: the samples.
        length: to pad them to, if the level is ragged.
        size: of the batch that they are computed in; some are repeated for it.
    """
    shape = node.meta.shape[1:]
    before = shape[0] if level.form.ragged else length
    if not outside.fits(node, level.form.ragged):
        return None
    padded = np.resize(some.places, size).tolist()
    given = {}
    if some.start is not None and some.rows is not None:
        rows, own = some.rows, some.start.meta.shape[1:]
        if rows.shape[1:] != own or length != before:
            rows = rows[:, : length if level.form.ragged and own[0] == before else own[0]]
        rows = rows[torch.from_numpy(np.resize(np.arange(len(rows)), size)).to(rows.device)]
        given[some.start] = laid_out(rows, some.start.meta.shape, some.start.meta.stride)
    if level.form.ragged:
        shape = (length, *shape[1:])
    found = outside.replayed(node, padded, length if level.form.ragged else None, given)
    return found[: len(some.places)] if found is not None and found.shape[1:] == shape else None
