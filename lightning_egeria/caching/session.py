"""The cache of one fit: it follows what is frozen, and has one batch at a time go through the network."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np

from lightning_egeria.caching.entries import CachedValues
from lightning_egeria.caching.frozen import FrozenModules, TrueTensors
from lightning_egeria.caching.loader import Line
from lightning_egeria.caching.serve import CachedBatch
from lightning_egeria.core.network.compilation import is_compiled
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.observers import Observer, ObserverCallback


class CacheSession(Observer):
    """Finds the frozen modules of the model, whatever has frozen them, whenever what trains or its modes change.

    Args:
        trainer: the Trainer, in ``fit``.
        notices: takes messages.

    Attributes:
        lines: one pipeline of batches for each loader, by name; training is ``"training"``.
    """

    def __init__(self, trainer: pl.Trainer, notices: Notices) -> None:
        self.lines: dict[str, Line] = {}
        self._trainer = trainer
        self._replaced: list[CachedValues] = []
        self._notices = notices
        self._found: dict[bool, FrozenModules] = {}  # in training and not
        self._behind_training: set[str] = set()  # see `FrozenModules`
        self._untold: set[FrozenModules] = set()  # see `_tell_what_is_random`
        self._seen: dict[bool, tuple[Any, ...]] = {}
        self._active: FrozenModules | None = None  # a batch runs on these
        self._training: CachedBatch | None = None
        self._over: list[CachedBatch] = []  # the program may still hold inputs of these that were not loaded
        self._closed = self._walks = False
        self._is_off = False  # nothing is cached in this epoch, whatever the steps change
        freezing = freezing_of(trainer)
        self._follower = ObserverCallback() if freezing is None else None
        self._observers = freezing.observers if freezing is not None else None
        if self._follower is not None:
            self._observers = self._follower.observers
            self._follow(True)
        assert self._observers is not None  # one of both has them
        self._observers.add(self)

    def will_compare(self, batches_ahead: int) -> bool:
        """Whether the callback that freezes needs the input of the batch that many ahead."""
        freezing = freezing_of(self._trainer)
        if freezing is None:
            return False
        freezer = freezing.freezer
        looks = freezing.is_searching or (freezer is not None and freezer.looks_at_next_step)
        return freezing.will_compare(batches_ahead) or (batches_ahead == 1 and looks)

    def add(self, name: str, line: Line) -> None:
        """Have a loader's batches go through the network; one of the same name ends."""
        before = self.lines.pop(name, None)
        if before is not None:  # the same loader may have been made again, with the same entries
            before.close(remove=False)
            self._replaced.append(before.stream.values)
        self.lines[name] = line
        found = self._found.get(name == "training")
        line.stream.start(found if found is not None and len(found) else None, keep=False)

    def begins(self, name: str) -> bool:
        """A pass over the data of a loader begins; return whether a batch of it may be cached."""
        self._end()
        training = name == "training"
        if training:
            self._look(training=True, walk=True)
        else:  # the model is put into evaluation mode before the first batch arrives
            self._walks = True
        found = self._found.get(training)
        is_known = found is not None and found.trains_as_before()
        is_off = self.lines[name].stream.frozen is None and is_known and freezing_of(self._trainer) is None
        if training:
            self._is_off = is_off
            self._follow(not is_off)
            if is_off:  # no step does it
                self._settle()
        return not is_off

    def _follow(self, follows: bool) -> None:
        """Have Lightning call this session in the steps of an epoch, or spare it the calls."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
        if self._follower is None or (self._follower in callbacks) is follows:
            return
        if follows:
            callbacks.append(self._follower)
        else:
            callbacks.remove(self._follower)

    def arrived_for_training(self, batch: CachedBatch | None) -> None:
        """A training batch is on its way to its step."""
        self._training = batch

    def arrived_for_validation(self, batch: CachedBatch | None) -> None:
        """The batch of a validation loader is there; the one before it is over."""
        self._end()
        if not self._trainer.lightning_module.training:  # the first one is fetched before that
            self._look(training=False, walk=self._walks)
            self._walks = False
        self._next(batch, settled_but=1)  # Lightning holds the last one until it has this one

    def batch_start(self, batch: Any, step: int) -> None:
        """The training step is about to run."""
        if not self._is_off:
            self._look(training=True)
        self._next(self._training)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While the model runs on the training batch that arrived last, which is not trained as it is."""
        self._look(training=True)
        batch, self._training = self._training, None
        if batch is not None:
            batch.is_looked_at = True
        self._enter(batch)
        try:
            yield
        finally:
            if batch is not None and not batch.demands and self._active is not None:
                self._active.end()  # the model did not run, which says nothing about the cache
                self._active = None
                batch.drop()
            self._end()

    def batch_end(self) -> None:
        """The training batch is over."""
        self._training = None
        self._end()

    def abort(self) -> None:
        """The training batch has no end."""
        self.batch_end()

    def epoch_end(self) -> None:
        """Load what the program has kept of the epoch: the dataset may have changed when that is read."""
        self._settle()

    def optimizer_step(self, step: int) -> None:
        """What trains may have changed."""
        if not self._is_off:
            self._look(training=True)

    def forget_verified(self, ids: Iterable[int] | None) -> None:
        """Compare samples with their entries before these are used again."""
        for line in self.lines.values():
            line.stream.forget_verified(None if ids is None else np.fromiter(ids, np.int64))

    def measure_disk(self) -> None:
        """Update ``bytes_on_disk`` of all statistics."""
        for line in self.lines.values():
            line.stream.values.measure_disk()

    def close(self, remove: bool) -> None:
        """Leave the model as it was; ``remove`` what was cached on disk, or leave it. Safe to call twice."""
        self._closed = True
        if self._observers is not None:
            self._observers.remove(self)
        try:
            self._settle()
            self._end()
        finally:  # what the program has kept may be lost, but nothing else stays
            if self._active is not None:
                self._active.end()
            for line in self.lines.values():
                line.stop_workers()
            for line in self.lines.values():
                line.close(remove)
            for values in self._replaced:
                values.close(remove)
            self.lines, self._replaced, self._found, self._untold = {}, [], {}, set()
            self._training = self._active = None
            self._follow(False)

    def _next(self, batch: CachedBatch | None, settled_but: int = 0) -> None:
        self._settle(settled_but)
        if batch is not None:
            self._over.append(batch)
        self._enter(batch)

    def _enter(self, batch: CachedBatch | None) -> None:
        """Have a batch go through the network; another one may be there still."""
        self._end()
        frozen = batch.frozen if batch is not None else None
        if batch is None:
            return
        if frozen is None or frozen not in self._found.values():  # planned before that changed
            frozen = batch.frozen = TrueTensors(self._trainer.lightning_module)
        started = time.perf_counter()
        if (path := frozen.missing()) is not None:
            for line in self.lines.values():
                line.stream.stop(f"the frozen module {path!r} was replaced, or its forward")
        self._active = frozen
        frozen.begin(batch)
        batch.around += time.perf_counter() - started

    def _end(self) -> None:
        """The batch in the network is over."""
        frozen, self._active = self._active, None
        if frozen is None or frozen.batch is None:
            return
        batch = frozen.batch
        started = time.perf_counter()
        frozen.end()
        batch.around += time.perf_counter() - started
        with frozen.in_its_modes():
            batch.finish()
        self._tell_what_is_random(frozen)

    def _tell_what_is_random(self, frozen: FrozenModules) -> None:
        """Say which frozen modules would be served in another mode: none of those behind what trains."""
        if frozen not in self._untold:
            return
        self._untold.remove(frozen)
        for path, what in frozen.random.items():
            if not frozen.is_behind_training(path):
                self._notices.inform(
                    f"the frozen module {path!r} runs in every step, because it is in training mode with {what}. Put "
                    "it into evaluation mode to have its output cached",
                    once=f"random {path}",
                )

    def _settle(self, all_but: int = 0) -> None:
        """Compute what the program has kept of batches that are over, but for the last ``all_but``."""
        while len(self._over) > all_but:
            batch = self._over.pop(0)
            with batch.frozen.in_its_modes() if batch.frozen is not None else contextlib.nullcontext():
                batch.settle()

    def _look(self, training: bool, walk: bool = False) -> None:
        """Find what is frozen, if that has changed."""
        line = self.lines.get("training")
        with line.stream.spending() if line is not None else contextlib.nullcontext():
            self._find(training, walk)

    def _find(self, training: bool, walk: bool) -> None:
        model: Any = self._trainer.lightning_module
        before = self._found.get(training)
        if self._closed or model is None or self._active is not None:
            return
        freezing = freezing_of(self._trainer)
        prefix = freezing.freezer.prefix if freezing is not None and freezing.freezer is not None else None
        steps = None if training else self._found.get(True)
        settling = steps.norms if steps is not None else frozenset()
        seen = (prefix, prefix.version if prefix is not None else 0, settling)
        if before is not None and self._seen.get(training) == seen and before.is_current(walk):
            return
        self._seen[training] = seen
        if training:
            self._behind_training.clear()
        for batch in self._over:
            batch.tape.settle(computed_only=True)
        found = FrozenModules(model, prefix, before, self._behind_training, settling)
        stay = before is not None and before.is_part_of(found)
        keep = stay and before is not None and not before.changed()
        if stay and not keep:
            self._notices.warn("the frozen layers have changed, so their outputs are cached again", once="changed")
        if keep and before is not None:
            found.watch_as(before)
        self._found[training] = found
        if is_compiled(model) and len(found):
            text = "the model is compiled: cached steps run uncompiled, and their last bits differ"
            self._notices.inform(text, once="compiled")
        self._untold.add(found)
        if not len(found):
            self._tell_what_is_random(found)
        settles = prefix is not None and prefix.depth > prefix.settled_depth
        for name, line in self.lines.items():
            if (name == "training") is training:
                line.stream.start(found if len(found) and not settles else None, keep=keep and not settles)
                if settles:
                    line.stream.stats.off = "running statistics still settle"
