"""The training loader: it scores the batches of the user's, and yields those that are trained."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_egeria.core.batches.reading import numbered
from lightning_egeria.core.batches.rows import samples_of
from lightning_egeria.core.snapshots.random_state import LoadingState, RandomState, preserved_random_state
from lightning_egeria.core.training.checkpoints import return_to
from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.selecting.collating import Collated
from lightning_egeria.methods.selecting.joining import Joining
from lightning_egeria.methods.selecting.losses import LossTable
from lightning_egeria.methods.selecting.queue import (
    QueuedRows,
    SelectedSamples,
    SelectionQueue,
    TrainingBatchInfo,
    queued_rows,
)
from lightning_egeria.methods.selecting.rule import Settings, draw, draw_fixed
from lightning_egeria.methods.selecting.stats import SelectionStats
from lightning_egeria.methods.selecting.trainer_access import TrainerAccess
from lightning_egeria.upstream.lightning import is_asked_by_loop, is_asked_whether_iterable

CHECKED_BATCHES = 2  # at the start, on which the losses of the samples are compared with that of the step
SCORED_PARTS = 4  # of a batch: batches of stale samples have this many sizes
_Ids = tuple[Any, ...] | None
_WasMoved = tuple[Any, RandomState] | None

# Forward batches that are over by then, what is known of the training batch, and the batch.
_Out = tuple[int, TrainingBatchInfo, Any]


class SelectedBatches:
    """Yields training batches for the loop of Lightning. For all others it is the user's loader.

    Args:
        loader: the user's loader, of this process.
        settings: what is selected.
        table: the last losses of the samples.
        side: what it asks of the Trainer.
        stats: counts what is done.

    Attributes:
        emitted: the batches that were yielded and not yet trained.
    """

    def __init__(
        self, loader: Any, settings: Settings, table: LossTable, side: TrainerAccess, stats: SelectionStats
    ) -> None:
        vars(self).update(_loader=loader)
        self.emitted: deque[TrainingBatchInfo] = deque()
        self._settings, self._table, self._side, self._stats = settings, table, side, stats
        self._joining = Joining(loader, side, in_queue=settings.share is None, in_order=bool(table.staleness))
        self._queue = SelectionQueue()
        self._begun = LoadingState.current([loader])
        self._position = self._size = self._checked = 0
        self._waiting: dict[int, QueuedRows] = {}  # of a checkpoint, until their batches are loaded again
        self._again: dict[int, RandomState] = {}  # in which batches of a checkpoint are loaded again
        self._loaded: deque[tuple[int, RandomState]] = deque(maxlen=2)
        self._random = self._begun.random  # in which the last batch was loaded
        self._now: LoadingState | None = None  # of a checkpoint, until the epoch begins or resumes
        self._seen = self._resumed_seen = 0
        self._collated: Collated | None = None  # what the loader handed on, if that is not the batch itself

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in vars(self):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker_init_fn":  # Lightning sets it
            setattr(self._loader, name, value)
        else:
            vars(self)[name] = value

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if is_asked_whether_iterable():
            return iter(())  # this must draw no random number
        if not is_asked_by_loop():
            return iter(self._loader)
        self._side.reads_nothing_ahead()
        self.emitted.clear()
        self._queue.clear()
        self._loaded.clear()
        if self._position and self._now is not None:
            return self._batches(None)  # the order of the epoch that was left is drawn again, once its number is known
        if self._now is not None:
            return_to(self._now, [self._loader], "selective backprop")
        self._now = None
        self._position, self._begun = 0, LoadingState.current([self._loader])
        return self._batches(iter(self._joining.source))

    def go_on_from(self, before: SelectedBatches) -> None:
        """Take what is known of the samples from the loader of an earlier epoch."""
        self._size = before._size
        self._joining.know(before._joining.forms, before._joining.keeps_samples, before._joining.layout)

    def take_resumed(self) -> int:
        """Return, once, `TrainingBatchInfo.seen` of the last batch before a checkpoint in this epoch; else 0."""
        resumed, self._resumed_seen = self._resumed_seen, 0
        return resumed

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._joining.source.close()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning reads it in the middle of an epoch only. `rank_states` has the state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see `state_dict`."""

    def rank_states(self) -> list[dict[str, Any]]:
        """Return the state of each rank, in plain types. Every rank must call it."""
        own = {
            "position": self._position,
            "seen": self._seen,
            "size": self._size,
            "forms": sorted(self._joining.forms),
            "layout": self._joining.layout,
            "keeps": self._joining.keeps_samples,
            "begun": self._begun.to_plain() if self._position else None,
            "now": LoadingState.current([self._loader]).to_plain(),
            # Batches that were loaded and wait: while the queue empties, or to know which is the last.
            "ahead": [[at, random.to_plain()] for at, random in self._loaded if 0 < self._position <= at],
            "queue": self._queue.state_dict(),
            "rule": self._settings.rule.state_dict(),
            "table": self._table.state_dict(),
            "stats": self._stats.state_dict(),
        }
        return self._side.ranks.each(own)

    def load_rank_states(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Continue from the state of this rank, also in the middle of an epoch."""
        own = ranks[self._side.rank % len(ranks)]
        self._settings.rule.load_state_dict(own["rule"])
        self._table.load_state_dict(own["table"])
        self._stats.load_state_dict(own["stats"])
        self._size = int(own["size"])
        self._joining.know(own["forms"], bool(own["keeps"]), dict(own["layout"]))
        if len(ranks) != self._side.world_size:
            return
        self._now = LoadingState.from_plain(own["now"])
        if own["position"]:
            self._position, self._resumed_seen = int(own["position"]), int(own["seen"])
            self._begun = LoadingState.from_plain(own["begun"])
            self._waiting = queued_rows(own["queue"])
            self._again = {number: rows.random for number, rows in self._waiting.items()}
            self._again |= {int(number): RandomState.from_plain(random) for number, random in own["ahead"]}

    def _batches(self, arriving: Iterator[tuple[Any, _Ids]] | None) -> Iterator[Any]:
        skipped = 0
        if arriving is None and self._now is not None:
            skipped, now, self._now = self._position, self._now.random, None
            return_to(self._begun, [self._loader], "selective backprop")
            arriving = iter(self._joining.source)
        assert arriving is not None
        for number, (batch, ids, random), is_end in numbered(self._noted(arriving), self._side.batches):
            self._random = random
            self._collated = batch if isinstance(batch, Collated) else None
            batch = self._collated.batch if self._collated is not None else batch
            if number < skipped:
                self._refill(number, batch, ids)
                if number + 1 < skipped:
                    continue
                now.restore()
                leading = self._queued(number, is_end=True, more=False) if is_end else iter(())
            else:
                leading = self._trained(number, batch, ids, is_end)
            for place, emitted, one in leading:
                self._position, self._seen = 0 if emitted.last else place, emitted.seen
                self.emitted.append(emitted)
                if emitted.last:
                    self._stats.dropped += len(self._queue)
                    self._queue.clear()
                yield one
                if emitted.last:
                    return

    def _noted(self, arriving: Iterator[tuple[Any, _Ids]]) -> Iterator[tuple[Any, _Ids, RandomState]]:
        """Yield each batch with the random state that it draws from: samples loaded here, or else its hooks.

        Batches of a checkpoint that wait there, whole or in the queue, draw from it again.
        """
        is_loaded_here = getattr(self._loader, "num_workers", 0) == 0
        for number in itertools.count():
            again = self._again.pop(number, None)
            with contextlib.nullcontext() if again is None else preserved_random_state():
                if again is not None:
                    again.restore()
                random = RandomState.current()
                loaded = next(arriving, None)
            if loaded is None:
                return
            random = random if again is not None or is_loaded_here else RandomState.current()
            self._loaded.append((number, random))
            yield *loaded, random

    def _trained(self, number: int, batch: Any, ids: _Ids, is_end: bool) -> Iterator[_Out]:
        """Yield the training batches that a forward batch leads to."""
        window, side, queue = self._settings.window, self._side, self._queue
        samples = len(ids) if ids is not None else samples_of(batch)
        self._size = max(self._size, samples)
        if samples > self._settings.rule.history:
            raise ArgumentError(
                f"history must be at least the batch size, got {self._settings.rule.history} and a batch of {samples} "
                "samples"
            )
        self._check(number, batch, samples)
        is_open = window.is_open(side.epoch, side.progress(number))
        if not is_open:
            yield from self._queued(number - 1, is_end=True, more=True)
        self._stats.count(side.epoch, seen=samples)  # a checkpoint before it has not seen it
        if not is_open or window.is_full(number) or side.compares_next():
            yield self._whole(number, batch, ids, samples, more=not is_end or len(queue) >= self._fewest)
        elif self._settings.share is not None:
            yield self._part(number, batch, ids, samples, is_end)
        else:
            self._select(number, batch, ids, samples, is_end)
            if not is_end:
                yield from self._queued(number, is_end=False, more=True)
        if is_end:
            yield from self._queued(number, is_end=True, more=False)

    @property
    def _fewest(self) -> int:
        """Samples of a batch from the queue: BatchNorm does not train on one."""
        return min(2, self._size)

    def _check(self, number: int, batch: Any, samples: int) -> None:
        """Find out at the start whether the losses of the samples can be had, and whether the queue can join them."""
        self._joining.check(batch, samples, self._collated)
        if self._checked < CHECKED_BATCHES and self._settings.rule.needs_losses:
            self._checked += 1
            self._side.check(batch, samples, number, self._joining.moved_rows)

    def _whole(self, number: int, batch: Any, ids: _Ids, samples: int, more: bool) -> _Out:
        count, last, seen = self._agreed(samples, more, number)
        if count < samples:
            rows = np.arange(count)
            batch, ids = self._joining.rows(batch, samples).take(rows).batch(), ids[:count] if ids is not None else None
        self._joining.trains_whole()
        return number + 1, TrainingBatchInfo(seen, last, ids, count, whole=True), batch

    def _queued(self, number: int, is_end: bool, more: bool) -> Iterator[_Out]:
        """Yield batches of the queue: full ones, and at the end what is left; a single sample only to end the epoch.

        Where plasticity may be measured on the next batch, full ones wait until a whole batch was trained.
        """
        while (size := self._queue.next_size(self._size, is_end)) >= (self._fewest if more else 1):
            if not is_end and self._side.compares_next():
                return
            goes_on = more or len(self._queue) > size
            # Only the last batch of the queue has seen the whole epoch.
            count, last, seen = self._agreed(size, goes_on, number - (is_end and goes_on))
            pieces = self._queue.pop(count)
            ids = tuple(one for piece in pieces for one in piece.ids or ())
            emitted = TrainingBatchInfo(seen, last, ids if len(ids) == count else None, count)
            yield number + 1, emitted, self._joining.batch_of(pieces)

    def _agreed(self, samples: int, more: bool, number: int) -> tuple[int, bool, int]:
        """Samples of the next batch, whether it is the last, and the forward batches seen, the same on all ranks."""
        if self._settings.share is not None:
            return samples, not more, number + 1
        count, goes_on, seen = self._side.ranks.least([samples, more, number + 1])
        return count, not goes_on, seen

    def _part(self, number: int, batch: Any, ids: _Ids, samples: int, is_end: bool) -> _Out:
        """A fixed number of the samples of a batch."""
        share, rule = self._settings.share or 1, self._settings.rule
        # Not a single sample of a small last batch: BatchNorm does not train on one.
        count = max(1, round(share * samples), min(2, samples, round(share * self._size)))
        with self._joining.looking():
            losses, moved = self._losses(number, batch, ids, samples)
            probabilities = rule.probabilities(losses) if rule.needs_losses else np.ones(samples)
            rows = draw_fixed(probabilities, count, self._generator(number))
            piece = self._piece(number, batch, moved, ids, samples, rows)
        if rule.needs_losses:
            self._stats.count_losses(losses, np.isin(np.arange(samples), rows))
        return (
            number + 1,
            TrainingBatchInfo(number + 1, is_end, piece.ids, count),
            self._joining.batch_of([piece]),
        )

    def _select(self, number: int, batch: Any, ids: _Ids, samples: int, is_end: bool) -> None:
        """Put the samples of a batch that are kept into the queue."""
        rule = self._settings.rule
        with self._joining.looking():
            losses, moved = self._losses(number, batch, ids, samples)
            kept = draw(probabilities := rule.probabilities(losses), self._generator(number))
            if is_end and len(self._queue) + kept.sum() < self._fewest:  # the epoch has promised one more batch
                kept[np.argsort(probabilities, kind="stable")[-self._fewest :]] = True
            if kept.any():
                self._queue.add(self._piece(number, batch, moved, ids, samples, np.flatnonzero(kept)))
        if rule.needs_losses:
            self._stats.count_losses(losses, kept)

    def _losses(self, number: int, batch: Any, ids: _Ids, samples: int) -> tuple[NDArray[np.float64], _WasMoved]:
        """The loss of each sample; and the batch on its device with `SelectedSamples.hooks`, if it went there."""
        side, table, epoch = self._side, self._table, self._side.epoch
        if not self._settings.rule.needs_losses:
            return np.zeros(samples), None
        hooks = RandomState.current()
        if not table.staleness or ids is None:
            moved = side.moved(batch)
            losses = side.scorer.losses(moved, samples, number)
            self._stats.count(epoch, scored=samples)
            return losses, (moved, hooks)
        rows, moved = table.to_score(ids, epoch, -(-self._size // SCORED_PARTS)), None
        if len(rows):
            part = self._joining.cached_part(batch, samples, rows) if len(rows) < samples else None
            if part is not None:
                with self._joining.looking():
                    fresh = side.scorer.losses(side.moved(part), len(rows), number)
            elif len(rows) == samples or self._joining.is_cached(batch, samples):  # as a whole
                moved = side.moved(batch)
                fresh = side.scorer.losses(moved, samples, number)[rows]
            else:
                part = side.moved(self._joining.rows(batch, samples).take(rows).batch())
                fresh = side.scorer.losses(part, len(rows), number)
            table.update([ids[row] for row in rows], fresh, epoch)
            self._stats.count(epoch, scored=len(rows) if moved is None else samples)
        return table.of(ids), (moved, hooks) if moved is not None else None

    def _piece(
        self, number: int, batch: Any, moved: _WasMoved, ids: _Ids, samples: int, rows: NDArray[np.int64]
    ) -> SelectedSamples:
        return self._joining.piece(number, batch, moved, ids, samples, rows, self._random, self._collated)

    def _refill(self, number: int, batch: Any, ids: _Ids) -> None:
        """Put samples back into the queue of the checkpoint. All that left it meanwhile take the same way once more."""
        if number in self._waiting:
            before = self._waiting.pop(number)
            samples = len(ids) if ids is not None else samples_of(batch)
            hooks = before.hooks or RandomState.current()
            hooks.restore()
            moved = (self._side.moved(batch), hooks) if before.moved else None
            piece = self._piece(number, batch, moved, ids, samples, np.concatenate([before.gone, before.rows]))
            self._queue.add(piece.take(slice(len(before.gone), None)))

    def _generator(self, number: int) -> np.random.Generator:
        """Random numbers of a forward batch: they follow from its place alone, so a resumed run draws the same."""
        return np.random.default_rng([self._settings.seed, self._side.rank, self._side.epoch, number])
