"""One batch under the cache, from its arrival to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.front import Front
from lightning_egeria.caching.levels import Level
from lightning_egeria.caching.outputs import BatchSizes, Output, Read, Some, agree, computed_at
from lightning_egeria.caching.plan import Loaded, Mode
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.meta import version_of
from lightning_egeria.lazy.outside import Outside
from lightning_egeria.lazy.sending import receive
from lightning_egeria.lazy.tape import Node, Tape
from lightning_egeria.lazy.tensors import caller
from lightning_egeria.lazy.units import precision_of
from lightning_egeria.profiling.clock import mark
from lightning_egeria.stores.rows import Flags, Rows, laid_out
from lightning_egeria.stores.samples import stamp_of


class Owner(Protocol):
    """What a batch asks of the stream that it belongs to."""

    keys: Keys
    front: Front | None
    outside: Outside

    @property
    def sizes(self) -> BatchSizes:
        """Sizes of batches whose rows have the same bits."""

    def level_at(self, depth: int) -> Level | None:
        """The level of a boundary."""

    def load(self, batch: CachedBatch, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load tensors of samples."""

    def front_is_unchanged(self) -> bool:
        """Whether the front is the one that entries were computed by."""

    def differs(self, samples: int) -> None:
        """The front computes something else than the entries of so many samples say."""

    def forget(self, level: Level, entries: Rows, doubt: bool) -> None:
        """Make misses of entries whose samples have changed; ``doubt`` all others if that could not be seen."""

    def judge_length(self, level: Level, node: Node) -> None:
        """Find out whether entries of a level serve batches of other lengths, unless that is known."""

    def computed(self, batch: CachedBatch, node: Node, value: Tensor, some: Some | None = None) -> None:
        """The output at the deepest boundary was computed, for all samples or for some."""

    def finish(self, batch: CachedBatch) -> None:
        """The batch is over."""

    def dropped(self, batch: CachedBatch) -> None:
        """The batch does not run."""

    def touched_late(self, batch: CachedBatch) -> None:
        """The program reads inputs after the end of their batch."""


class CachedBatch:
    """A batch of a training or validation loader while something is frozen.

    Args:
        owner: the stream that it belongs to.
        front: the front that it was planned for; None if that is gone.
        loaded: what was loaded.
        reads: its rows, while they are being read.
        waited: seconds that the program waited for it.

    Attributes:
        batch: the user's batch, with lazy tensors for the inputs of the front.
        tape: its recorded operations.
        eager: whether layer modules run at once; so in a trial.
        calls: number of calls of the front that reached its boundary.
        matches: how many of them were recorded as the entries were.
        hits: samples of the first such call whose output came from the deepest boundary.
        advanced: samples of it whose output came from a shallower one.
        is_looked_at: the model runs on it, and some of its rows may be trained then.
        output: what the program got at its boundary, if it is looked at; None if that is of no use.
        ready: an output in memory for these rows; None if it has to be read or computed.
        is_timed: whether its time tells what reading entries takes, or computing the output.
        was_touched: what first needed an input that was not loaded, in words; None if nothing did.
        other_shape: of its output at the boundary, which has no place among the entries; None if it has.
        began: the front was called.
        ended: its boundary was reached.
    """

    def __init__(self, owner: Owner, front: Front | None, loaded: Loaded, reads: list[Read], waited: float) -> None:
        self.plan = loaded.plan
        self.loaded = loaded
        self.front = front
        self.waited = waited
        self.eager = self.plan.mode is Mode.TRIAL
        self.entries: Rows = np.asarray(self.plan.entries, np.int64)
        self.calls = self.matches = self.hits = self.advanced = 0
        self.is_looked_at = False
        self.output: Output | None = None
        self.ready: Output | None = None
        self.is_timed = True
        self.was_touched: str | None = None
        self._older: dict[int, Node] = {}
        self._versions: dict[int, int] = {}
        self._is_over = self._is_kept = self._doubts = False
        self.other_shape: tuple[int, ...] | None = None
        self.began: float | torch.cuda.Event | None = None
        self.ended: float | torch.cuda.Event | None = None
        self._owner = owner
        self.reads = reads
        self.tape = Tape(owner.keys, len(self.plan.ids), lambda places: owner.load(self, places), self._touched, self)
        self.batch = receive(loaded.batch, self.tape)
        loaded.batch, self.lazy, self.fields = None, loaded.lazy, loaded.fields
        order = self.tape.order
        if order is not None and order != list(range(len(self.plan.ids))):
            self.entries = self.entries[order]
            self.lazy = tuple(self.lazy[position] for position in order)
            self.fields = tuple(self.fields[position] for position in order)
            self.reads = [read.in_order(order) for read in reads]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.tape.size

    def takes_outside(self, unit: str) -> bool:
        """Whether the front may begin with tensors that the program made: only in its first layer module."""
        return self.front is not None and unit in self.front.first

    def enter(self) -> None:
        """The front is called."""
        if self.began is None and self.front is not None:
            self.began = mark(self.front.device)

    def boundary(self, depth: int, node: Node) -> Tensor | None:
        """Return the output at the deepest boundary with the help of entries; None if it has to be computed."""
        front, level = self.front, self._owner.level_at(depth)
        if front is None or front is not self._owner.front:
            return None
        if depth < front.depth:
            self._older[depth] = node
            return None
        self.calls += 1
        if level is None or self.eager or node.key != level.key:
            return None
        self.matches += 1
        if self._owner.sizes.verdict(self.samples) is not True:
            return None
        output = self._ready(level, node) if self.ready is not None else self._assembled(level, node, front)
        if output is not None:  # else it is computed now, and `reached` ends the time
            self.ended = self.ended or mark(front.device)
            self._keep(level, node, output)
        return output

    def _ready(self, level: Level, node: Node) -> Tensor | None:
        """Return the output in memory, if it belongs to these rows; None otherwise."""
        ready, self.ready = self.ready, None  # the program may change it
        made, front = self._owner.outside.stamps(node, level.form.ragged), self.front
        if ready is None or front is None or not ready.is_of(node, made, front.state):
            return None
        if not self._owner.front_is_unchanged():
            return None
        self.hits += self.samples * (self.calls == 1)
        self.is_timed = False
        return laid_out(ready.value, node.meta.shape, node.meta.stride)

    def _keep(self, level: Level, node: Node, value: Tensor) -> None:
        """Keep what the program gets, for a batch of some of these rows. The front has been found unchanged."""
        if self.is_looked_at and not self.eager and self.output is None and self.front is not None:
            made = self._owner.outside.stamps(node, level.form.ragged)
            if made is not None and len(value) == self.samples:
                self.output = Output(value, version_of(value), node.key, made, self.front.state)

    def _assembled(self, level: Level, node: Node, front: Front) -> Tensor | None:
        if node.meta.shape[:1] != (self.samples,) or not level.form.takes(node.meta.shape[1:]):
            self.other_shape = node.meta.shape
            return None
        length = node.meta.shape[1] if level.form.ragged else 1
        missing = np.ones(self.samples, bool)
        parts: list[tuple[Rows, Tensor]] = []
        computed: list[tuple[Some, Tensor]] = []
        for read in self.reads:
            start = node if read.level is level else self._older.get(read.level.depth)
            form = read.level.form
            if start is None or start.key != read.level.key or not form.takes(start.meta.shape[1:]):
                continue  # another computation, or samples of another size
            if start is not node and form.rounds:
                continue  # it would be rounded twice
            own = start.meta.shape[1] if form.ragged else 1
            if (made := self._owner.outside.stamps(start, form.ragged)) is None:
                continue
            data, read_rows, known, lengths = read.future.result()
            if self._versions.setdefault(id(read), version_of(data)) != version_of(data):
                continue  # the program has changed in place what it got of an earlier call
            chosen = np.arange(len(read.places)) if read.rows is None else read.rows
            sound = read_rows[chosen] & self._is_of(read, known[chosen], made)
            if form.ragged:
                self._owner.judge_length(read.level, start)
                sound &= read.level.padded.serves(lengths[chosen], own)
            if not sound.any():
                continue
            if not parts and not self._owner.front_is_unchanged():
                return None
            longest = int(lengths[chosen[sound]].min()) if form.ragged and start is not node else own
            data = data.to(front.device, non_blocking=True)  # whole, as it is pinned, before it is cut
            rows = form.from_memory(data[:, :longest].contiguous() if form.ragged else data)
            if read.rows is not None or not sound.all() or not read_rows.all():
                kept = (np.cumsum(read_rows) - 1)[chosen[sound]]
                rows = rows[torch.from_numpy(kept).to(rows.device)]
            places = read.places[sound]
            if start is not node:
                some = Some(places, start, rows)
                found = self.computed_at(level, node, some, length)
                if found is None:
                    continue
                computed.append((some, found))
                rows = found
                self.advanced += len(places) * (self.calls == 1)
            else:
                self.hits += len(places) * (self.calls == 1)
            missing[places] = False
            parts.append((places, rows))
        if missing.all():
            return None
        if missing.any():
            some = Some(np.flatnonzero(missing))
            found = self.computed_at(level, node, some, length)
            if found is None:
                return None
            computed.append((some, found))
            parts.append((some.places, found))
        whole = parts[0][1]
        if len(parts) > 1 or whole.is_inference():
            whole = level.form.empty(self.samples, length, front.device)
            for places, rows in parts:
                whole[torch.from_numpy(places).to(front.device)] = rows
        if self._doubts or (self.plan.checks and not self._agrees(level, node, whole, length)):
            self.hits = self.advanced = 0
            return None
        for some, rows in computed:
            self._owner.computed(self, node, rows, some)
        if computed:
            whole = level.form.rounded(whole)
        return laid_out(whole, node.meta.shape, node.meta.stride)

    def _agrees(self, level: Level, node: Node, whole: Tensor, length: int) -> bool:
        """Whether the front computes for the samples to check what their entries say, to rounding."""
        order = self.tape.order or range(len(self.plan.ids))
        places = np.array([row for row, position in enumerate(order) if position in self.plan.checks], np.int64)
        proven = self._owner.sizes.verdict(len(places)) is True
        self.is_timed = False
        if not len(places):  # the collate function has left them out
            return True
        found = self.computed_at(level, node, Some(places), length, len(places))
        if found is None:
            found, proven = self.computed_at(level, node, Some(places), length), True
        known = whole[torch.from_numpy(places).to(whole.device)]
        if found is None or agree(level.form, known, found, proven, precision_of(node)):
            return True
        self._owner.differs(len(places))
        return False

    def computed_at(self, level: Level, node: Node, some: Some, length: int, size: int | None = None) -> Tensor | None:
        """Compute the output of some samples at the boundary of a level, with padding up to a length if it is ragged.

        In a batch of a ``size``, by default one whose rows have the same bits. None if that is not possible.
        """
        size = size or self._owner.sizes.size_for(len(some.places), self.samples)
        return computed_at(self._owner.outside, level, node, some, length, size)

    def reached(self, node: Node, value: Tensor) -> Tensor:
        """The output at the deepest boundary was computed for the whole batch; return it as an entry would be."""
        front = self.front
        if front is None or front is not self._owner.front:
            return value
        self.ended = self.ended or mark(front.device)
        self._owner.computed(self, node, value)
        self.tape.is_over = self.tape.is_over or self.eager  # in a trial, labels are lazy too
        level = self._owner.level_at(front.depth)
        if level is None or level.key != node.key:
            return value
        value = level.form.rounded(value)
        if self.is_looked_at and self._owner.front_is_unchanged():
            self._keep(level, node, value)
        return value

    def rows(self, level: Level, length: int) -> Tensor | None:
        """Return the rows of all samples from a level, of a length if it is ragged; None if one is missing."""
        found = (read.of_all(self.samples, length) for read in self.reads if read.level is level)
        return next((rows for rows in found if rows is not None), None)

    def finish(self) -> None:
        """The batch is over: compute what the program still holds of the front."""
        self._is_kept = True
        self.tape.settle(computed_only=True)
        self._is_over = True
        for read in self.reads:
            read.future.cancel()
        self._owner.finish(self)

    def settle(self) -> None:
        """Compute what the program has kept of the batch."""
        self._is_kept = True
        self.tape.settle()

    def drop(self) -> None:
        """The batch does not run."""
        self._is_over, self.front = True, None
        for read in self.reads:
            read.future.cancel()
        self._owner.dropped(self)

    def _is_of(self, read: Read, known: npt.NDArray[np.uint64], made: npt.NDArray[np.uint64]) -> Flags:
        """Which entries were computed from these samples, and from what the program made of them; ``[places]``."""
        level, entries = read.level, self.entries[read.places]
        lazy = np.array(self.lazy, bool)[read.places]
        same: Flags = (made[read.places] == known[:, 1]) & (~lazy | level.verified[entries])  # in doubt since then?
        changed, doubt = [], False
        for at, place in enumerate(read.places.tolist()):
            if lazy[at]:
                continue
            fields = self.fields[place]
            stamp = stamp_of(fields) if fields is not None else None
            if stamp != known[at, 0]:
                same[at] = False
                if stamp != level.stamps[entries[at], 0]:  # else it was written anew since
                    changed.append(entries[at])
                    doubt |= bool(level.verified[entries[at]])
            else:
                level.verify(entries[at], self.plan.doubts)
        if changed:
            self._owner.forget(level, np.array(changed), doubt)
            self._doubts |= doubt and any(self.lazy)
        return same

    def _touched(self) -> None:
        if self.was_touched is None and any(self.lazy):
            package = str(Path(__file__).parents[1])
            self.was_touched = "something that keeps a batch after its step" if self._is_kept else caller(package)
            if self._is_over and self.front is not None:  # else it is counted at the end
                self._owner.touched_late(self)
