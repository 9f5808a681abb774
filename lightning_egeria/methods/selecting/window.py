"""When samples are selected, and when a batch is trained whole."""

from __future__ import annotations

import dataclasses

from lightning_egeria.errors import ArgumentError, check_integers


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of a run in which samples are selected.

    The first epoch is always whole: its losses say little about what a sample teaches.

    Args:
        start: share of the run at which selection begins, in [0, 1].
        end: share of the run at which it ends, above ``start`` and at most 1.
        full_every: one batch in this many is trained whole; 0 trains none whole.

    Raises:
        ArgumentError: an argument is out of its range.

    >>> window = Window(start=0.5)
    >>> window.is_open(epoch=1, progress=0.4), window.is_open(epoch=5, progress=0.5)
    (False, True)
    """

    start: float = 0.0
    end: float = 1.0
    full_every: int = 0

    def __post_init__(self) -> None:
        numbers = all(hasattr(value, "__float__") for value in (self.start, self.end))
        if not numbers or not 0 <= self.start < self.end <= 1:
            raise ArgumentError(
                f"start and end must be shares of the run with 0 <= start < end <= 1, got {self.start} and {self.end}"
            )
        check_integers(0, full_every=self.full_every)

    @property
    def is_whole_run(self) -> bool:
        """Whether the window does not depend on the length of the run."""
        return self.start == 0 and self.end == 1

    def is_open(self, epoch: int, progress: float) -> bool:
        """Whether samples are selected.

        Args:
            epoch: number of the epoch, from 0.
            progress: share of the run that is over.
        """
        return epoch > 0 and self.start <= progress < (self.end if self.end < 1 else float("inf"))

    def is_full(self, number: int) -> bool:
        """Whether batch ``number`` of an epoch, from 0, is trained whole although the window is open."""
        return self.full_every > 0 and (number + 1) % self.full_every == 0
