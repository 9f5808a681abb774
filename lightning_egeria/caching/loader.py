"""The user's DataLoader, with a plan behind each batch that the training loop asks for."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_egeria.caching.loading import PlannedDataset, WorkerInit, as_it_is, whole
from lightning_egeria.caching.plan import Kept, Loaded, Mode, Plan
from lightning_egeria.caching.record.sending import joined_rows
from lightning_egeria.caching.serve import CachedBatch, joined
from lightning_egeria.caching.stream import Stream
from lightning_egeria.core.batches.reading import BatchesThrough, LoaderCopies, copy_of, why_no_ids
from lightning_egeria.core.batches.rows import Index, Rows
from lightning_egeria.core.batches.worker_calls import CallableWorkers
from lightning_egeria.core.snapshots.contents import changed, digests_of
from lightning_egeria.core.training.loops import fetches_batches
from lightning_egeria.core.training.order import draws_at_once, has_samples_once, is_shuffled
from lightning_egeria.upstream.lightning import is_asked_by_loop

LOOK_AHEAD_BATCHES = 3


def why_not(loader: Any, step: Callable[..., Any]) -> str | None:
    """Return why the batches of a loader cannot be planned for a step of the module; None if they can."""
    if fetches_batches(step):
        return f"{step.__name__} takes dataloader_iter, and fetches its own batches. Take a batch instead"
    if (reason := why_no_ids(loader)) is not None:
        return reason
    if not hasattr(loader.dataset, "__len__"):
        return f"the dataset {type(loader.dataset).__name__} has no length"
    try:
        len(loader)
    except TypeError:
        return "the DataLoader has no length"
    return None


class Line:
    """The way of a loader's batches through a `Stream`. They can be looked at before samples of them are trained.

    Args:
        loader: the user's DataLoader; `why_not` returns None for it.
        make_stream: makes the stream; gets the dataset, and a function that loads tensors of a batch's samples.
        epochs: returns the number of the epoch, and of all epochs or None.
        arrived: called with each batch that is handed on, or None for one without the cache; and at the end.
        begins: called when a pass over the data begins; returns whether a batch of it may be cached.
        looking: returns a context for running the model on the last batch, which is not trained as it is.

    Attributes:
        stream: plans, serves and records.
        loader: what to give to Lightning: a copy of the user's loader. Its class has the line as ``lookahead``.
        looking: as above.
        is_followed: whether the ids of all batches are known from the next pass on, whether anything is cached or not.
        wrap: returns a collate function to use in the place of the user's where nothing is cached; None: the user's.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        make_stream: Callable[[PlannedDataset, Any], Stream],
        epochs: Callable[[bool], tuple[int, int | None]],
        arrived: Callable[[CachedBatch | None], None],
        begins: Callable[[], bool],
        looking: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.looking = looking
        self._last: CachedBatch | Plan | None = None  # that was yielded; its plan if it bypassed the cache
        self._joined: CachedBatch | None = None
        self.is_followed = False
        self.wrap: Callable[[Any], Any] | None = None
        self._dataset = PlannedDataset(loader.dataset, loader.collate_fn)
        self.stream = make_stream(self._dataset, self._load)
        self._epochs, self._arrived, self._begins = epochs, arrived, begins
        self._copies = LoaderCopies()
        self._workers: CallableWorkers | None = None
        self.loader: Any = self._followed(loader)

    def goes_on_with(self, loader: DataLoader[Any]) -> bool:
        """Take a loader that was made again in the place of the last one; return whether their batches are alike."""
        before = self.loader
        if loader.batch_size != before.batch_size or not _are_alike(loader.collate_fn, before.collate_fn):
            return False
        if loader.dataset is not before.dataset:
            if not _are_alike(loader.dataset, before.dataset):
                return False
            self.stream.forget_verified()  # samples may be others where that cannot be seen
        self.stop_workers()
        self.loader, self._joined = self._followed(loader), None
        return True

    def _followed(self, loader: DataLoader[Any]) -> Any:
        kind = self._kind = type(loader)

        def batches(loader: Any) -> Iterator[Any]:
            """A loop of Lightning gets planned batches; all others get ordinary ones."""
            return self.iterate() if is_asked_by_loop() else kind.__iter__(loader)

        members = {"__iter__": batches, "__module__": kind.__module__, "__doc__": kind.__doc__, "lookahead": self}
        # What is pickled or copied is one of the user's kind.
        members["__reduce__"] = lambda one: (object.__new__, (kind,), vars(one).copy())
        followed = copy_of(loader)
        object.__setattr__(followed, "__class__", type(kind.__name__, (kind,), members))
        return followed

    def iterate(self) -> Iterator[Any]:
        """Begin a pass over the data for a loop of Lightning."""
        loader = self.loader
        self._dataset.dataset, self._dataset.collate = loader.dataset, loader.collate_fn
        self._dataset.collate_plain = self.wrap(loader.collate_fn) if self.wrap is not None else loader.collate_fn
        epoch, epochs = self._epochs(has_samples_once(loader))
        if not self._begins() and not self.is_followed:
            self.stop_workers()
            self._last = None
            return self._kind.__iter__(loader)
        self.stream.begin_epoch(epoch, epochs, loader.num_workers > 0, len(loader), is_shuffled(loader))
        # At once, as the user's does: it draws a random number and starts the workers.
        planned, self._workers = self._planned(loader)
        return self._batches(iter(planned))

    def last_ids(self) -> tuple[Any, ...]:
        """Return the ids of the samples of the last batch, in the order of its rows."""
        last = self._last
        if not isinstance(last, CachedBatch):
            return last.ids if last is not None else ()
        ids, order = last.plan.ids, last.tape.order
        return ids if order is None or _has_twice(order) else tuple(ids[position] for position in order)

    def looked(self, batch: Rows) -> Looked | None:
        """Return what is known of the last batch; None of one without the cache."""
        last = self._last
        if not isinstance(last, CachedBatch) or _has_twice(last.tape.order):
            return None
        return Looked(last, batch, self.last_ids())

    def trains(self) -> None:
        """Have the batch joined last, or else the last of the loader, go through the frozen modules next."""
        batch, self._joined = self._joined, None
        last = self._last
        self._arrived(batch if batch is not None else last if isinstance(last, CachedBatch) else None)

    def joined(self, parts: Sequence[tuple[Looked | None, Index]], again: bool = True) -> Any:
        """Return some rows of batches as one batch; None if the cache does not know all of them.

        If samples were kept, they are collated ``again``.
        """
        known = [(one, rows) for one, rows in parts if one is not None]
        if len(known) < len(parts):
            return None
        return self._join(known, again)

    def _join(self, parts: Sequence[tuple[Looked, Index]], again: bool) -> Any:
        started = time.perf_counter()
        places = [(one, row) for one, rows in parts for row in rows.tolist()]
        samples = Kept.joined((one.cached.loaded.kept, one.positions(rows)) for one, rows in parts) if again else None
        ready = joined([(one.cached.outputs, rows) for one, rows in parts]) if samples is None else None
        ready = ready if self.stream.is_proven(len(places)) else None
        batch = joined_rows([(one.batch, rows) for one, rows in parts]) if samples is None else None
        if samples is None and batch is None:
            return None
        plan = self.stream.plan_again([one.ids[row] for one, row in places], reads=ready is None)
        if plan is None or plan.mode is Mode.PLAIN or any(one.cached.plan.version != plan.version for one, _ in parts):
            return None
        plan = dataclasses.replace(plan, doubts=min(one.cached.plan.doubts for one, _ in parts))
        if samples is not None:  # collating may change them
            loaded = self._dataset.batch_of(plan, copy.deepcopy(samples))
        else:
            lazy, fields = ([getattr(one.cached, name)[row] for one, row in places] for name in ("lazy", "fields"))
            loaded = Loaded(batch, plan, tuple(lazy), tuple(fields))
        loaded.workers = tuple(one.cached.loaded.workers[at] for one, rows in parts for at in one.positions(rows))
        given, cached = self.stream.receive(loaded, time.perf_counter() - started)
        if cached is None:
            return None
        cached.ready = ready or {}
        self._joined = cached
        return given

    def samples(self, looked: Looked | None, rows: Index) -> list[Any] | None:
        """Return some samples of a batch, as the user's dataset returns them; None if they were not kept."""
        if looked is None:
            return None
        cached, positions = looked.cached, looked.positions(rows)
        kept = Kept.joined([(cached.loaded.kept, positions)])
        if kept is None:
            return None

        def load(places: list[tuple[int, int]]) -> list[Tensor]:
            return self.stream.load(cached, [(positions[at], number) for at, number in places])

        return whole(cached.plan, kept, load)

    def stop_workers(self) -> None:
        """Stop the workers, which may have stores of all lines open. Safe to call twice."""
        self._copies.close()

    def close(self, remove: bool) -> None:
        """Stop the workers and the stream; ``remove`` its stores, or leave them. Safe to call twice."""
        self.stop_workers()
        self.stream.close(remove)

    def _load(self, loaded: Loaded, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load tensors of samples in the processes that have loaded the samples, or here if these have ended."""
        found: dict[tuple[int, int], Tensor] = {}
        for worker in dict.fromkeys(loaded.workers[position] for position, _ in places):
            wanted = [(position, number) for position, number in places if loaded.workers[position] == worker]
            if worker is not None and self._workers is not None and self._workers.has(worker):
                tensors = self._workers.call(worker, loaded.plan, wanted)
            else:
                tensors = self._dataset.tensors(loaded.plan, wanted)
            found.update(zip(wanted, tensors, strict=True))
        return [found[place] for place in places]

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        try:
            while True:
                started = time.perf_counter()
                try:
                    loaded = next(iterator)
                except StopIteration:
                    return
                waited = time.perf_counter() - started
                self.stream.accounts.race.arrived(loaded.plan.number, waited)
                *given, cached = self.stream.receive(loaded, waited)
                self._last = cached if cached is not None else loaded.plan
                del loaded
                self._arrived(cached)
                del cached
                yield given.pop()  # what the program does not hold must not be held here
        finally:
            self._arrived(None)

    def _planned(self, loader: DataLoader[Any]) -> tuple[DataLoader[Any], CallableWorkers | None]:
        """A DataLoader that is asked for plans instead of indices, and its workers."""
        ahead = LOOK_AHEAD_BATCHES if draws_at_once(loader) and loader.num_workers == 0 else 0
        batch_sampler = loader.batch_sampler
        return self._copies.with_calls(
            loader,
            dataset=self._dataset,
            batch_sampler=BatchesThrough(batch_sampler, lambda batches: self._plans(batches, batch_sampler, ahead)),
            collate_fn=as_it_is,
            worker_init_fn=WorkerInit(loader.worker_init_fn) if loader.num_workers else None,
        )

    def _plans(self, batches: Iterator[Any], batch_sampler: Any, most_ahead: int) -> Iterator[Plan]:
        waiting: deque[Plan] = deque()
        asked = 0
        while True:
            ahead = most_ahead if self.stream.reads_ahead else 0
            # The batch that is wanted now, and further ones, but not the end of a sampler, which may draw there.
            while not waiting or (len(waiting) <= ahead and asked < len(batch_sampler) - 1):
                ids = next(batches, None)
                if ids is None:
                    yield from map(self.stream.last_look, waiting)
                    return
                asked += 1
                waiting.append(self.stream.plan(list(ids)))
            yield self.stream.last_look(waiting.popleft())


class Looked(NamedTuple):
    """A batch that was looked at.

    Attributes:
        cached: the batch, as the cache knows it.
        batch: as the program got it.
        ids: of its samples, in the order of its rows.
    """

    cached: CachedBatch
    batch: Rows
    ids: tuple[Any, ...]

    def positions(self, rows: Index) -> list[int]:
        """Return the positions of samples in the plan of their batch, by their rows."""
        order = self.cached.tape.order
        return [order[row] if order is not None else row for row in rows.tolist()]


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two objects hold the same, as far as it can be seen."""
    return one is other or changed(digests_of(one), digests_of(other)) is None


def _has_twice(order: Sequence[int] | None) -> bool:
    """Whether a collate function has taken a sample twice, so that rows are not samples."""
    return order is not None and len(set(order)) < len(order)
