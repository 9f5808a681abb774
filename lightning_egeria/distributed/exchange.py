"""The interface of an exchange of gradients that not all ranks computed."""

from __future__ import annotations

from collections.abc import Sequence


class GradientExchange:
    """Gives every rank the mean of each gradient over the ranks that computed it.

    Attributes:
        replaces_ddp: whether DDP must exchange nothing in the backward of this exchange.
    """

    replaces_ddp: bool

    def prepare(self) -> None:
        """The next batch begins. Every rank must call it. Does nothing by default."""

    def begin(self, depths: Sequence[int]) -> None:
        """Exchange the gradients of the backward that comes next. Every rank must call it with the same depths.

        Args:
            depths: number of layer modules in front of each rank's suffix.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Set all gradients to the means, once backward is over. Does nothing without `begin`."""
        raise NotImplementedError

    def abort(self) -> None:
        """Exchange nothing: the backward does not come, or failed."""
        raise NotImplementedError

    def close(self) -> None:
        """Restore everything. Safe to call twice."""
        raise NotImplementedError

    def received(self, depths: Sequence[int], rank: int) -> float:
        """Return the bytes of gradients that a rank receives in a step.

        Args:
            depths: number of layer modules in front of each rank's suffix.
            rank: the rank.
        """
        raise NotImplementedError
