"""Outputs of the front: being read, of some samples, still in memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.levels import Found, Level, Rows
from lightning_egeria.caching.weights import FrontState
from lightning_egeria.lazy.tape import Node, version_of

Made = npt.NDArray[np.uint64]


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
    state: FrontState

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

    def is_of(self, node: Node, made: Made | None, state: FrontState) -> bool:
        """Whether it is the value of a node, of whose rows the program has made the same."""
        if made is None or self.state is not state or self.key != node.key:
            return False
        return self.value.shape == node.meta.shape and np.array_equal(self.made, made)
