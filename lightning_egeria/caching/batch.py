"""One batch under the cache, from its arrival to its end."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_egeria.caching.front import Front
from lightning_egeria.caching.lazy import Keys, Node, Tape, version_of
from lightning_egeria.caching.levels import Flags, Level, Pieces, Rows
from lightning_egeria.caching.loading import receive, stamp_of
from lightning_egeria.caching.plan import Loaded, Mode
from lightning_egeria.profiling.clock import mark
from lightning_egeria.snapshots.digests import bytes_of

Read = Future[tuple[Pieces, Flags]]
_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class Owner(Protocol):
    """What a batch asks of the stream that it belongs to."""

    keys: Keys
    front: Front | None

    def level_at(self, depth: int) -> Level | None:
        """The level of a boundary."""

    def is_proven(self, level: Level, size: int) -> bool:
        """Whether batches of this size have the same rows as those that entries were computed in."""

    def load(self, batch: CachedBatch, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load tensors of samples."""

    def front_is_unchanged(self) -> bool:
        """Whether the front is the one that entries were computed by."""

    def computed(self, batch: CachedBatch, node: Node) -> None:
        """The front computed the output at the deepest boundary."""

    def finish(self, batch: CachedBatch) -> None:
        """The batch is over."""


class CachedBatch:
    """A batch of a training or validation loader while something is frozen.

    Args:
        owner: the stream that it belongs to.
        front: the front that it was planned for; None if that is gone.
        loaded: what was loaded.
        reads: its rows, by level, while they are being read.
        waited: seconds that the program waited for it.

    Attributes:
        batch: the user's batch, with lazy tensors for the inputs of the front.
        tape: its recorded operations.
        eager: whether layer modules run at once; so in a trial.
        served: depths of the boundaries that had a cached output, for each call of the front.
        was_touched: file and line of the program that first needed an input that was not loaded; None if nothing did.
        has_computed: whether the front computed the output at its boundary.
        made_differs: what the program made of a sample is not what the entry was computed from.
        began: the front was called.
        ended: its boundary was reached.
    """

    def __init__(
        self, owner: Owner, front: Front | None, loaded: Loaded, reads: dict[int, Read], waited: float
    ) -> None:
        self.plan = loaded.plan
        self.loaded = loaded
        self.front = front
        self.waited = waited
        self.eager = self.plan.mode is Mode.TRIAL
        self.entries: Rows = np.asarray(self.plan.entries, np.int64)
        self.served: list[int] = []
        self.was_touched: str | None = None
        self.has_computed = False
        self.made_differs = False
        self.began: float | torch.cuda.Event | None = None
        self.ended: float | torch.cuda.Event | None = None
        self._owner = owner
        self.reads = reads
        self.tape = Tape(owner.keys, len(self.plan.ids), lambda places: owner.load(self, places), self._touched, self)
        self.batch = receive(loaded.batch, self.tape)
        loaded.batch = None

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.plan.ids)

    def takes_outside(self, unit: str) -> bool:
        """Whether the front may begin with tensors that the program made: only at its first module."""
        return self.front is not None and unit == self.front.units[0].path

    def enter(self) -> None:
        """The front is called."""
        if self.began is None and self.front is not None:
            self.began = mark(self.front.device)

    def boundary(self, depth: int, node: Node) -> Tensor | None:
        """Return the cached output at a boundary; None if it has to be computed."""
        level = self._owner.level_at(depth)
        front = self.front
        if level is None or front is None or self.eager or self.plan.checks or front is not self._owner.front:
            return None
        if node.key != level.key or not self._owner.is_proven(level, self.samples):
            return None
        rows = self.rows(level)
        if rows is None or not self._is_of(level, node) or not self._owner.front_is_unchanged():
            return None
        output = rows.batch(level.form, None, front.device)
        if self.served and output.data_ptr() == rows.data.data_ptr():
            output = output.clone()  # an earlier call of the front has it already
        self.served.append(depth)
        if depth == front.depth:
            self.ended = self.ended or mark(front.device)
        return output

    def reached(self, node: Node) -> None:
        """The output at the deepest boundary was computed."""
        if self.front is not None and self.front is self._owner.front:
            self.ended = self.ended or mark(self.front.device)
            self.has_computed = True
            self._owner.computed(self, node)

    def rows(self, level: Level) -> Pieces | None:
        """Return the rows of all samples from a level; None if one is missing."""
        read = self.reads.get(level.depth)
        if read is None:
            return None
        pieces, sound = read.result()
        return pieces if sound.all() and level.present(self.entries).all() else None

    def stamps(self, node: Node) -> npt.NDArray[np.uint64] | None:
        """Return a digest of what the program made of each sample, ``[samples]``; None if it cannot be known."""
        if not self.tape.has_outside:
            return np.zeros(self.samples, np.uint64)
        outside = [leaf for leaf in node.leaves() if leaf.row is None]
        states = [xxhash.xxh3_64() for _ in range(self.samples)]
        for leaf in outside:
            if leaf.value is None or leaf.version != version_of(leaf.value):
                return None
            value = leaf.value.detach()
            head = f"{leaf.key} {tuple(value.shape)} {value.dtype}"
            if value.ndim and value.shape[0] == self.samples:
                head = f"{leaf.key} {tuple(value.shape[1:])} {value.dtype}"
                parts = [bytes_of(row) for row in value.cpu()]
            else:
                parts = [bytes_of(value)] * self.samples
            for state, part in zip(states, parts, strict=True):
                state.update(head.encode())
                state.update(part)
        return np.array([state.intdigest() if outside else 0 for state in states], np.uint64)

    def finish(self) -> None:
        """The batch is over: compute what the program still holds of the front."""
        self.tape.settle(computed_only=True)
        for read in self.reads.values():
            read.cancel()
        self._owner.finish(self)

    def _is_of(self, level: Level, node: Node) -> bool:
        """Whether the entries were computed from these samples, and from what the program made of them."""
        known = level.stamps[self.entries]
        if self.plan.mode is not Mode.LAZY:
            now = np.array([stamp_of(one) if one is not None else 0 for one in self.loaded.fields], np.uint64)
            if not self.loaded.fields or (now != known[:, 0]).any():
                if self.loaded.fields:
                    level.forget(self.entries[now != known[:, 0]])
                return False
            level.verified[self.entries] = True
        made = self.stamps(node)
        same = made is not None and bool((made == known[:, 1]).all())
        self.made_differs = self.made_differs or not same
        return same

    def _touched(self) -> None:
        if self.was_touched is None and self.plan.mode is Mode.LAZY:
            frame: Any = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
                frame = frame.f_back
            self.was_touched = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
