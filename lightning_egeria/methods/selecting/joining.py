"""Chosen samples of one or several batches, as a batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_egeria.core.batches.reading import BatchSource
from lightning_egeria.core.batches.rows import Layout, Rows, check_forms, layout_of_both, layout_of_default
from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.methods.selecting.collating import Collated, InOrder, WithSamples
from lightning_egeria.methods.selecting.queue import SelectedSamples, joined
from lightning_egeria.methods.selecting.trainer_access import TrainerAccess, Transferred

if TYPE_CHECKING:
    from lightning_egeria.caching.loader import Line


class Joining:
    """Takes samples out of batches and makes batches of them.

    A cache knows its batches, so it joins rows of them. Samples of one shape are rows too. Samples that are padded to
    other lengths in each batch are collated again, by the cache if it has them.

    Args:
        loader: the user's loader.
        side: what is asked of the Trainer.
        in_queue: whether samples of several batches are joined.
        in_order: whether rows must have the order of the samples, for the sake of their ids.

    Attributes:
        source: the batches.
        forms: of the samples so far, two at most.
        layout: what the columns of a batch are, as far as batches have shown.
    """

    def __init__(self, loader: Any, side: TrainerAccess, in_queue: bool, in_order: bool) -> None:
        self._loader, self._side = loader, side
        self._in_queue, self._in_order = in_queue, in_order
        self.source = BatchSource(loader, self._collate)
        self.forms: set[str] = set()
        self.layout: Layout = {}
        self._learnt: Layout = {}  # as far as collate functions have shown, and not by sizes alone
        self._keeps = torch.zeros((), dtype=torch.bool).share_memory_()

    @property
    def _is_default(self) -> bool:
        return getattr(self._loader, "collate_fn", None) is default_collate

    def _collate(self, users: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        collate = InOrder(users) if self._in_order else users
        return WithSamples(collate, self._keeps, joins=self._in_queue, looks=not self._is_default)

    @property
    def keeps_samples(self) -> bool:
        """Whether batches come with their samples, because they are padded to several lengths."""
        return bool(self._keeps)

    def know(self, forms: Iterable[str], keeps_samples: bool, layout: Layout) -> None:
        """Take the forms that samples had so far, whether batches have to come with them, and what the columns are."""
        self.forms, self.layout = set(sorted({*forms})[:2]), layout
        if self._in_queue and (keeps_samples or len(self.forms) > 1):
            self._keeps.fill_(True)
            if self.source.lookahead is not None:
                self.source.lookahead.stream.keep_samples()

    def check(self, batch: Any, samples: int, collated: Collated | None) -> None:
        """Learn what the columns are, and find out at the start whether samples of several batches can be joined.

        Raises:
            RowsError: they cannot, or a batch cannot be taken apart.
        """
        if self._is_default and not self.layout:
            self.layout = layout_of_default(batch)
        if collated is not None and collated.layout is not None:
            self.layout = self._learnt = layout_of_both(self._learnt, collated.layout)
        rows, lookahead = self.rows(batch, samples), self.source.lookahead
        self.know({*self.forms, rows.form}, self.keeps_samples, self.layout or rows.layout)
        # The first epoch is whole, so samples are kept when some wait. A cache knows their order.
        in_order = collated.in_order if collated is not None else lookahead is not None and lookahead.looked(rows)
        if self._in_queue and not in_order:
            check_forms(self.forms)

    def rows(self, batch: Any, samples: int) -> Rows:
        """Take a batch apart."""
        return Rows.of(batch, samples, self.layout)

    def moved_rows(self, batch: Any, samples: int) -> Rows:
        """Take a batch apart that went through the hooks for batches, which may have made something else of it."""
        return Rows.of(batch, samples, {} if self._side.has_batch_hooks else self.layout)

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """While the model runs on a batch that is not trained as it is."""
        return self.source.lookahead.looking() if self.source.lookahead is not None else contextlib.nullcontext()

    def trains_whole(self) -> None:
        """The last batch is trained as it is."""
        if self.source.lookahead is not None:
            self.source.lookahead.trains()

    def is_cached(self, batch: Any, samples: int) -> bool:
        """Whether a cache knows the last batch, as a whole."""
        return self._lookahead is not None and self._lookahead.looked(self.rows(batch, samples)) is not None

    def cached_part(self, batch: Any, samples: int, rows: NDArray[np.int64]) -> Any:
        """Return some rows of the last batch as a batch to look at; None if a cache does not know them."""
        if (lookahead := self._lookahead) is None:
            return None
        # As rows: a collate function that draws is not run once more.
        part = lookahead.joined([(lookahead.looked(self.rows(batch, samples)), rows)], again=False)
        if part is not None:
            lookahead.trains()
        return part

    @property
    def _lookahead(self) -> Line | None:
        """What joins samples so that a cache knows them. Behind hooks for batches, they are no longer what it knows."""
        return None if self._side.has_batch_hooks else self.source.lookahead

    def piece(
        self,
        number: int,
        batch: Any,
        moved: tuple[Any, RandomState] | None,
        ids: tuple[Any, ...] | None,
        samples: int,
        rows: NDArray[np.int64],
        random: RandomState,
        collated: Collated | None,
    ) -> SelectedSamples:
        """Return some samples of the last batch.

        Args:
            number: of the batch in its epoch.
            batch: all of it.
            moved: all of it on its device, and the random state before it went there; None if it did not.
            ids: of all its samples; None if they have none.
            samples: number of them.
            rows: the chosen ones.
            random: the random state in which it was loaded.
            collated: what its loader handed on; None if that is the batch.
        """
        chosen = tuple(ids[row] for row in rows) if ids is not None else None
        given = collated.samples if collated is not None else None
        raw = [given[row] for row in rows] if given is not None else None
        if raw is None and self.source.lookahead is not None and self._side.has_batch_hooks:
            raw = self.source.lookahead.samples(self.source.lookahead.looked(self.rows(batch, samples)), rows)
        if (lookahead := self._lookahead) is not None:
            whole = self.rows(batch, samples)
            return SelectedSamples(number, rows, chosen, whole.take(rows), random, lookahead.looked(whole), raw)
        if moved is not None:
            some, hooks = self.moved_rows(moved[0], samples).take(rows), moved[1]
        else:
            hooks = RandomState.current()
            part = self._side.moved(self.rows(batch, samples).take(rows).batch())
            some = self.moved_rows(part, len(rows))
        return SelectedSamples(number, rows, chosen, some, random, raw=raw, moved=moved is not None, hooks=hooks)

    def batch_of(self, pieces: Sequence[SelectedSamples]) -> Transferred:
        """Return samples as one batch.

        Raises:
            RowsError: they have several shapes, and cannot be collated again.
        """
        lookahead = self._lookahead
        if lookahead is not None:
            batch = lookahead.joined([(piece.looked, piece.rows) for piece in pieces])
            if batch is not None:
                lookahead.trains()
                return Transferred(self._side.moved(batch))
            given = [piece.raw or lookahead.samples(piece.looked, piece.rows) for piece in pieces]
        else:
            given = [piece.raw for piece in pieces]
        known = [samples for samples in given if samples is not None]
        if len(known) == len(pieces):
            return Transferred(self._side.moved(self._loader.collate_fn(list(itertools.chain(*known)))))
        batch = joined(pieces)
        return Transferred(batch if lookahead is None else self._side.moved(batch))
