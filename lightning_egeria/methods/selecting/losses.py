"""The last loss of each sample, by its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LossTable:
    """Keeps the last loss of each sample, and the epoch that it is from.

    Args:
        staleness: number of epochs for which a loss is used; 0 uses losses of the same epoch only.

    >>> table = LossTable(staleness=1)
    >>> table.update([7, 3], np.array([0.5, 2.0]), epoch=1)
    >>> table.stale([3, 4, 7], epoch=2).tolist(), table.stale([3], epoch=3).tolist()
    ([False, True, False], [True])
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._losses: dict[Any, tuple[float, int]] = {}

    def update(self, ids: Sequence[Any], losses: NDArray[np.floating], epoch: int) -> None:
        """Take the losses of some samples."""
        self._losses.update(zip(ids, [(loss, epoch) for loss in losses.tolist()], strict=True))

    def stale(self, ids: Sequence[Any], epoch: int) -> NDArray[np.bool_]:
        """Return which samples have no loss, or one that is too old; shape ``(samples,)``."""
        return self._epochs(ids) < epoch - self.staleness

    def to_score(self, ids: Sequence[Any], epoch: int, multiple: int) -> NDArray[np.int64]:
        """Return the rows of stale samples, in order, and of the next oldest, up to a multiple or all of them.

        So a cache sees batches of a few sizes only.

        >>> table = LossTable(staleness=1)
        >>> table.update("abcd", np.ones(4), epoch=2)
        >>> table.update("bd", np.ones(2), epoch=0)
        >>> table.to_score("abcd", 2, multiple=3).tolist(), table.to_score("ac", 2, multiple=3).tolist()
        ([0, 1, 3], [])
        """
        stale, oldest = int(self.stale(ids, epoch).sum()), np.argsort(self._epochs(ids), kind="stable")
        return np.sort(oldest[: -(-stale // multiple) * multiple])

    def of(self, ids: Sequence[Any]) -> NDArray[np.float64]:
        """Return the losses of samples that have one; shape ``(samples,)``."""
        return np.array([self._losses[one][0] for one in ids], np.float64)

    def _epochs(self, ids: Sequence[Any]) -> NDArray[np.float64]:
        """The epoch that each loss is from; before all epochs for a sample without one."""
        return np.array([self._losses[one][1] if one in self._losses else -np.inf for one in ids])

    def state_dict(self) -> dict[str, list[Any]]:
        """Return ids, losses and epochs, in plain types. Ids that are neither numbers nor texts are left out."""
        kept = [(one, *value) for one, value in self._losses.items() if isinstance(one, (int, str))]
        return {"losses": [list(one) for one in kept]}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Restore the losses."""
        self._losses = {one: (float(loss), int(epoch)) for one, loss, epoch in state["losses"]}
