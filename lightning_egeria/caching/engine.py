"""The cache of one fit: it follows the frozen prefix on behalf of every loader's stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front
from lightning_egeria.caching.level_set import LevelSet
from lightning_egeria.caching.loader import Line
from lightning_egeria.errors import CacheError
from lightning_egeria.network.compilation import is_compiled
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.training.callback import PrefixFreezing
from lightning_egeria.training.notices import Notices
from lightning_egeria.training.observers import Observer


class PrefixCache(Observer):
    """Makes the front of the frozen prefix, and has one batch at a time go through it.

    Args:
        owner: the callback that freezes.
        notices: takes messages.

    Attributes:
        owner: the callback that freezes.
        lines: the ways of the loaders' batches, by name; training is ``"training"``.
    """

    uses_outputs = True

    def __init__(self, owner: PrefixFreezing, notices: Notices) -> None:
        self.lines: dict[str, Line] = {}
        self.owner = owner
        self._replaced: list[LevelSet] = []
        self._notices = notices
        self._seen: tuple[FrozenPrefix | None, int] = (None, 0)
        self._front: Front | None = None
        self._training: CachedBatch | None = None
        self._over: list[CachedBatch] = []  # the program may still hold inputs of these that were not loaded
        self._closed = False

    def add(self, name: str, line: Line) -> None:
        """Have a loader's batches go through the front; one of the same name ends."""
        before = self.lines.pop(name, None)
        if before is not None:  # the same loader may have been made anew, with the same entries
            before.close(remove=False)
            self._replaced.append(before.stream.levels)
        self.lines[name] = line
        line.stream.start(self._front, keep=False)

    def arrived_for_training(self, batch: CachedBatch | None) -> None:
        """A training batch is on its way to its step."""
        self._training = batch

    def arrived_for_validation(self, batch: CachedBatch | None) -> None:
        """The batch of a validation loader is there; the one before it is over."""
        self._end()
        self._look()
        self._next(batch, settled_but=1)  # Lightning holds the last one until it has this one

    def batch_start(self, batch: Any, step: int) -> None:
        """The training step is about to run."""
        self._look()
        self._next(self._training)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While the model runs on the training batch that arrived last, which is not trained as it is."""
        self._look()
        batch, self._training = self._training, None
        if batch is not None:
            batch.is_looked_at = True
        self._enter(batch)
        try:
            yield
        finally:
            if batch is not None and batch.began is None and self._front is not None:
                self._front.end()  # the model did not run, which says nothing about the cache
                batch.drop()
            self._end()

    def batch_end(self) -> None:
        """The training batch is over."""
        self._training = None
        self._end()

    abort = batch_end  # a batch without an end

    def epoch_end(self) -> None:
        """Load what the program has kept of the epoch: the dataset may have changed when that is read."""
        self._settle()

    def optimizer_step(self, step: int) -> None:
        """The prefix may have changed."""
        self._look()

    def forget_verified(self, ids: Iterable[int] | None) -> None:
        """Compare samples with their entries before these are used again."""
        for line in self.lines.values():
            line.stream.forget_verified(None if ids is None else np.fromiter(ids, np.int64))

    def measure_disk(self) -> None:
        """Update ``bytes_on_disk`` of all statistics."""
        for line in self.lines.values():
            line.stream.levels.measure_disk()

    def close(self, remove: bool) -> None:
        """Leave the model as it was; ``remove`` what was cached on disk, or leave it. Safe to call twice."""
        self._closed = True
        try:
            self._settle()
            self._end()
        finally:  # what the program has kept may be lost, but nothing else stays
            if self._front is not None:
                self._front.end()
            for line in self.lines.values():
                line.stop_workers()
            for line in self.lines.values():
                line.close(remove)
            for levels in self._replaced:
                levels.close(remove)
            self.lines, self._replaced = {}, []
            self._training = self._front = None

    def _next(self, batch: CachedBatch | None, settled_but: int = 0) -> None:
        self._settle(settled_but)
        if batch is not None:
            self._over.append(batch)
        self._enter(batch)

    def _enter(self, batch: CachedBatch | None) -> None:
        """Have a batch go through the front; another one may be there still."""
        self._end()
        if batch is None or self._front is None:
            return
        if (path := self._front.missing()) is not None:
            for line in self.lines.values():
                line.stream.stop(f"the frozen module {path!r} was replaced, or its forward")
        self._front.begin(batch)

    def _end(self) -> None:
        """The batch in the front is over."""
        batch = self._front.batch if self._front is not None else None
        if self._front is None or batch is None:
            return
        self._front.end()
        batch.finish()
        if all(line.stream.front is None for line in self.lines.values()):
            self._front = None

    def _settle(self, all_but: int = 0) -> None:
        """Compute what the program has kept of batches that are over, but for so many of the last ones."""
        while len(self._over) > all_but:
            self._over.pop(0).settle()

    def _look(self) -> None:
        """Follow the prefix."""
        freezer = self.owner.freezer
        prefix = freezer.prefix if freezer is not None else None
        seen = (prefix, prefix.version if prefix is not None else 0)
        if self._closed or (seen[0] is self._seen[0] and seen[1] == self._seen[1]):
            return
        before, self._seen = self._front, seen
        for batch in self._over:
            batch.tape.settle(computed_only=True)
        if before is not None and prefix is not None and _is_again(before, prefix):
            return
        if before is not None:
            before.end()
        self._front = None
        if prefix is not None and prefix.settled_depth:
            self._front = self._front_of(prefix)
        old, new = before, self._front
        deeper = bool(old and new and old.prefix is prefix and old.depth <= new.depth and old.state.is_same())
        for line in self.lines.values():
            line.stream.start(self._front, keep=deeper)
            if prefix is not None and prefix.depth and self._front is None:
                settles = not prefix.settled_depth
                line.stream.stats.off = "running statistics still settle" if settles else "frozen layers cannot be read"

    def _front_of(self, prefix: FrozenPrefix) -> Front | None:
        """Return the front, if the state of its modules can be read."""
        try:
            front = Front(prefix, prefix.settled_depth)
        except CacheError as error:
            self._notices.warn(f"the cache is off: {error}", "unreadable")
            return None
        if is_compiled(prefix.module):
            text = "the model is compiled: cached steps run uncompiled, and their last bits differ"
            self._notices.inform(text, once="compiled")
        return front


def _is_again(front: Front, prefix: FrozenPrefix) -> bool:
    """Whether the front is frozen as before, though depths may have been tried meanwhile."""
    is_there = front.prefix is prefix and front.depth == prefix.settled_depth and front.missing() is None
    return is_there and front.state.is_same()
