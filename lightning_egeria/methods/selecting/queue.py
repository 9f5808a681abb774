"""Selected samples that wait until there is a full batch of them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_egeria.core.batches.rows import Rows
from lightning_egeria.core.snapshots.random_state import RandomState


@dataclasses.dataclass(frozen=True)
class SelectedSamples:
    """Selected samples of one forward batch.

    Attributes:
        number: number of the forward batch in its epoch.
        rows: their rows in it.
        ids: their ids; None if they have none.
        samples: the samples, on their device; or where there are no hooks for batches, maybe before that.
        random: the random state in which the forward batch was loaded.
        looked: what a cache knows of the forward batch; None if nothing.
        raw: the samples before the collate function; None if they are rows of one shape.
        moved: whether the whole forward batch went through the hooks for batches.
        hooks: the random state in which they began; None if there are none.
        gone: rows that left the queue before these.
    """

    number: int
    rows: NDArray[np.int64]
    ids: tuple[Any, ...] | None
    samples: Rows
    random: RandomState
    looked: Any = None
    raw: Sequence[Any] | None = None
    moved: bool = False
    hooks: RandomState | None = None
    gone: tuple[int, ...] = ()

    def take(self, places: slice) -> SelectedSamples:
        """Return a part of these, without what is in front of it or behind it."""
        return dataclasses.replace(
            self,
            rows=self.rows[places],
            ids=self.ids[places] if self.ids is not None else None,
            samples=self.samples.take(np.arange(len(self.rows))[places]),
            raw=self.raw[places] if self.raw is not None else None,
            gone=(*self.gone, *self.rows[: places.start or 0].tolist()),
        )


@dataclasses.dataclass(frozen=True)
class TrainingBatchInfo:
    """What is known of a training batch.

    Attributes:
        seen: number of forward batches of the epoch so far; with several processes, of the rank that has seen least.
        last: whether it is the last of its epoch.
        ids: ids of its samples; None if they have none.
        samples: number of its samples.
        whole: whether it is a forward batch, trained whole.
    """

    seen: int
    last: bool
    ids: tuple[Any, ...] | None
    samples: int
    whole: bool = False


class SelectionQueue:
    """Samples in the order of their selection.

    A batch leaves the queue once a quarter of a batch remains behind it, so a batch that leaves early is never the last
    one.
    """

    def __init__(self) -> None:
        self._pieces: deque[SelectedSamples] = deque()

    def __len__(self) -> int:
        return sum(len(piece.rows) for piece in self._pieces)

    def add(self, piece: SelectedSamples) -> None:
        """Add samples at the end."""
        if len(piece.rows):
            self._pieces.append(piece)

    def next_size(self, size: int, is_end: bool) -> int:
        """Return how many samples the next batch has; 0 if it has to wait.

        At the end, the rest leaves in as few batches as possible, of about the same size.

        Args:
            size: number of samples of a full batch.
            is_end: no more samples come.

        >>> queue = SelectionQueue()
        >>> queue.add(SelectedSamples(0, np.arange(9), None, Rows.of(np.zeros(9), 9), RandomState.current()))
        >>> queue.next_size(8, False), queue.next_size(8, True), queue.next_size(4, False)
        (0, 5, 4)
        """
        waiting = len(self)
        if is_end:
            return -(-waiting // -(-waiting // size)) if waiting else 0
        return size if waiting >= size + max(1, size // 4) else 0

    def pop(self, count: int) -> list[SelectedSamples]:
        """Remove and return the first ``count`` samples."""
        popped = []
        while count:
            piece = self._pieces.popleft()
            if len(piece.rows) > count:
                self._pieces.appendleft(piece.take(slice(count, None)))
                piece = piece.take(slice(count))
            popped.append(piece)
            count -= len(piece.rows)
        return popped

    def clear(self) -> None:
        """Drop all samples."""
        self._pieces.clear()

    def state_dict(self) -> dict[str, list[Any]]:
        """Return where the samples came from, in plain types."""
        return {
            "pieces": [
                [
                    *(piece.number, piece.rows.tolist(), piece.random.to_plain(), piece.moved),
                    piece.hooks.to_plain() if piece.hooks is not None else None,
                    list(piece.gone),
                ]
                for piece in self._pieces
            ]
        }


class QueuedRows(NamedTuple):
    """What a queue held of a forward batch; as in `SelectedSamples`."""

    rows: NDArray[np.int64]
    random: RandomState
    moved: bool
    hooks: RandomState | None
    gone: NDArray[np.int64]


def queued_rows(state: dict[str, list[Any]]) -> dict[int, QueuedRows]:
    """Return what a queue held, by the number of the forward batch."""
    return {
        int(number): QueuedRows(
            np.asarray(rows, np.int64),
            RandomState.from_plain(random),
            bool(moved),
            RandomState.from_plain(hooks) if hooks is not None else None,
            np.asarray(gone, np.int64),
        )
        for number, rows, random, moved, hooks, gone in state["pieces"]
    }


def joined(pieces: Sequence[SelectedSamples]) -> Any:
    """Return the samples of several pieces as one batch."""
    return Rows.joined([piece.samples for piece in pieces]).batch()
