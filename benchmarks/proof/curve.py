"""What a run notes of itself: its metrics, and what kinds of steps it took."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning

from lightning_egeria import FrozenPrefixCache, PrefixFreezing
from lightning_egeria.methods.selecting.stats import SelectionStats

MOSTLY = 0.9  # share of a batch's samples that makes it one of their kind, where steps are timed


class Curve(lightning.Callback):
    """Notes the metrics after each validation, with the batches that were done of each kind until then.

    The kind of a batch is the frozen depth, and with the cache what its samples did, each of them counted as its share
    of the batch: ``"5 hit"``; ``"5 from 3"``, what is cached of them is of depth 3, before it grew; ``"5 miss"``, they
    are written; or ``"5 off"``, neither. With partial backprop it is the depth in front of the suffix, ``"5 paused"``,
    and with a smaller batch the size of that, ``"0 of 48"``. It is what the time of a step depends on. Give it behind
    the method's callback, which counts the cache's batches before it then.

    Args:
        freezing: of the run, or None.
        cache: of the run, or None.
        selection: of the run, or None. Batches are counted by their samples then, and forward batches that were scored
            as a kind of their own: ``"0 score"``, or from entries ``"5 hit score"``.
        batch_size: of the data.
        partial: callback that computes suffixes, with the depth in front of the last one; None without.
        smaller: batch size, if it is not the workload's own.

    Attributes:
        points: one for each validation.
        durations: of every batch, the kind of nearly all of its samples, or ``"mixed"``, and the seconds that it took,
            waiting for it included.
    """

    def __init__(
        self,
        freezing: PrefixFreezing | None,
        cache: FrozenPrefixCache | None,
        selection: Callable[[], SelectionStats] | None = None,
        batch_size: int = 1,
        partial: Any = None,
        smaller: int | None = None,
    ) -> None:
        self.freezing, self.cache, self.selection, self.batch_size = freezing, cache, selection, batch_size
        self.partial, self.smaller = partial, smaller
        self._selected = (0, 0)
        self.points: list[dict[str, Any]] = []
        self.batches: dict[str, float] = defaultdict(float)
        self.durations: list[tuple[str, float]] = []
        self.seconds = 0.0
        self._mark = 0.0
        self._depth = self._shallower = 0
        self._counted = (0, 0, 0, 0)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._mark = time.perf_counter()

    def begin_step(self) -> None:
        """The next step begins now."""
        self._mark = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        depth = self.freezing.frozen_depth if self.freezing is not None else 0
        if depth != self._depth:
            self._depth, self._shallower = depth, self._depth

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        shares = self._shares()
        kind = max(shares, key=shares.__getitem__)
        self.durations.append((kind if shares[kind] >= MOSTLY else "mixed", now - self._mark))
        self.seconds += now - self._mark
        if self.selection is None:
            for part, share in shares.items():
                self.batches[part] += share
        else:
            stats = self.selection()
            before, self._selected = self._selected, (stats.scored, stats.trained)
            scored = f"{kind if kind.endswith('hit') else self._depth} score"
            self.batches[scored] += (stats.scored - before[0]) / self.batch_size
            self.batches[kind] += (stats.trained - before[1]) / self.batch_size
        self._mark = now

    def _shares(self) -> dict[str, float]:
        """Kinds of the batch that is over, and the share of its samples that is of each."""
        if self.partial is not None:
            return {f"{self.partial.depth} paused" if self.partial.depth else "0": 1}
        if self.smaller is not None:
            return {f"0 of {self.smaller}": 1}
        if self.cache is None or self._depth == 0:
            return {str(self._depth): 1}
        stats = self.cache.stats
        counted = (stats.hits, stats.advanced, stats.misses, stats.to_write)
        hits, advanced, misses, to_write = (now - before for now, before in zip(counted, self._counted, strict=True))
        self._counted = counted
        missed = f"{self._depth} {'miss' if to_write else 'off'}"
        samples = {f"{self._depth} hit": hits, f"{self._depth} from {self._shallower}": advanced, missed: misses}
        total = sum(samples.values())
        return {kind: count / total for kind, count in samples.items() if count} or {missed: 1}

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            metrics = {name: round(float(value), 6) for name, value in trainer.callback_metrics.items()}
            point = {
                "step": trainer.global_step,
                "seconds": round(self.seconds, 3),
                "batches": {kind: round(count, 3) for kind, count in self.batches.items()},
            }
            self.points.append(point | {"metrics": metrics})
        self._mark = time.perf_counter()
