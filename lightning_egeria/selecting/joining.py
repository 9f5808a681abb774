"""Chosen samples of one or several batches, as a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_egeria.batches.reading import BatchSource, Lookahead
from lightning_egeria.batches.rows import Rows, check_forms
from lightning_egeria.selecting.collating import Collated, InOrder, WithSamples
from lightning_egeria.selecting.queue import Piece, joined
from lightning_egeria.selecting.side import Moved, TrainerSide
from lightning_egeria.snapshots.random_state import RandomState


class Joining:
    """Takes samples out of batches and makes batches of them.

    A cache knows its batches, so it joins rows of them. Samples of one shape are rows too. Samples that are padded to
    other lengths in each batch are collated anew.

    Args:
        loader: the user's loader.
        side: what is asked of the Trainer.
        in_queue: whether samples of several batches are joined.
        in_order: whether rows must have the order of the samples, for the sake of their ids.

    Attributes:
        source: the batches.
        forms: of the samples so far.
    """

    def __init__(self, loader: Any, side: TrainerSide, in_queue: bool, in_order: bool) -> None:
        self._loader, self._side = loader, side
        self._in_queue, self._in_order = in_queue, in_order
        self.source = BatchSource(loader, self._collate)
        self.forms: set[str] = set()
        self._keeps = torch.zeros((), dtype=torch.bool).share_memory_()

    def _collate(self, users: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        collate = InOrder(users) if self._in_order else users
        # A cache knows no batch with the samples beside it.
        return WithSamples(collate, self._keeps) if self._in_queue and self.source.lookahead is None else collate

    def know(self, forms: Iterable[str]) -> None:
        """Take the forms that samples had before a checkpoint."""
        self.forms = set(forms)
        self._keeps.fill_(len(self.forms) > 1)

    def check(self, batch: Any, samples: int, collated: Collated | None) -> None:
        """Find out at the start whether samples of several batches can be joined.

        Raises:
            RowsError: they cannot.
        """
        self.know({*self.forms, self.rows(batch, samples).form})
        # The first epoch is whole, so they are known when samples wait.
        if self._in_queue and (collated is None or not collated.in_order):
            check_forms(self.forms)

    def rows(self, batch: Any, samples: int) -> Rows:
        """Take a batch apart."""
        return Rows.of(batch, samples, self.forms)

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """While the model runs on a batch that is not trained as it is."""
        return self.source.lookahead.looking() if self.source.lookahead is not None else contextlib.nullcontext()

    def trains_whole(self) -> None:
        """The last batch is trained as it is."""
        if self.source.lookahead is not None:
            self.source.lookahead.trains()

    def is_cached(self, batch: Any, samples: int) -> bool:
        """Whether a cache knows the last batch, as a whole."""
        return self._lookahead is not None and self._lookahead.last(self.rows(batch, samples)) is not None

    @property
    def _lookahead(self) -> Lookahead | None:
        """What joins samples so that a cache knows them. Behind hooks for batches, they are no longer what it knows."""
        return None if self._side.has_batch_hooks else self.source.lookahead

    def piece(
        self,
        number: int,
        batch: Any,
        moved: Any,
        ids: tuple[Any, ...] | None,
        samples: int,
        rows: NDArray[np.int64],
        random: RandomState,
        collated: Collated | None,
    ) -> Piece:
        """Return some samples of the last batch.

        Args:
            number: of the batch in its epoch.
            batch: all of it.
            moved: all of it on its device; None if it is not there.
            ids: of all its samples; None if they have none.
            samples: number of them.
            rows: the chosen ones.
            random: the random state in which it was loaded.
            collated: what its loader handed on; None if that is the batch.
        """
        chosen = tuple(ids[row] for row in rows) if ids is not None else None
        given = collated.samples if collated is not None else None
        raw = [given[row] for row in rows] if given is not None else None
        if (lookahead := self._lookahead) is not None:
            whole = self.rows(batch, samples)
            return Piece(number, rows, chosen, whole.take(rows), random, lookahead.last(whole))
        if moved is not None:
            return Piece(number, rows, chosen, self.rows(moved, samples).take(rows), random, raw=raw)
        part = self._side.moved(self.rows(batch, samples).take(rows).batch())
        return Piece(number, rows, chosen, self.rows(part, len(rows)), random, raw=raw)

    def batch_of(self, pieces: Sequence[Piece]) -> Moved:
        """Return samples as one batch.

        Raises:
            RowsError: they have several shapes, and nothing to collate anew.
        """
        if (lookahead := self._lookahead) is not None:
            batch = lookahead.joined([(piece.looked, piece.rows) for piece in pieces])
            if batch is not None:
                lookahead.trains()
            return Moved(self._side.moved(batch if batch is not None else joined(pieces)))
        if all(piece.raw is not None for piece in pieces):
            raw: Iterable[Any] = (one for piece in pieces for one in piece.raw or ())
            return Moved(self._side.moved(self._loader.collate_fn(list(raw))))
        return Moved(joined(pieces))
