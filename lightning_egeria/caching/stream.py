"""The batches of one loader, from their plans to their ends: what is cached of them, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front
from lightning_egeria.caching.level_set import LevelSet
from lightning_egeria.caching.levels import Level
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.outputs import BatchSizes, Some
from lightning_egeria.caching.padding import judge_folding, judge_length, with_padding
from lightning_egeria.caching.plan import Loaded, Mode, Plan
from lightning_egeria.caching.planner import Planner
from lightning_egeria.caching.stats import Accounts, CacheStats, Habits
from lightning_egeria.caching.trial import Trials
from lightning_egeria.errors import CacheError, StoreError
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.outside import Outside
from lightning_egeria.lazy.tape import Node
from lightning_egeria.snapshots.digests import same_bits
from lightning_egeria.stores.directory import CacheDirectory
from lightning_egeria.stores.limits import Limits
from lightning_egeria.stores.rows import Rows
from lightning_egeria.training.notices import Notices

MOVED = 3  # batches in a row with another front, before it is taken for the front
CHANGES_TO_STOP = 3  # of the weights of the front
DIFFERENCES_TO_STOP = 2  # between entries and what the front computes
UNLIKE = 6  # batches in a row without a text whose output is the same with other padding, before the cache stops


class Stream:
    """Plans the batches of one loader, and serves, computes and records the output of the frozen front for each.

    Args:
        name: ``"training"`` or the name of a validation loader, for messages and stores.
        dataset: the user's dataset, asked for planned batches.
        directory: folder of the stores.
        limits: limits of room.
        views: variants of each sample to cache; 0 loads samples as they come.
        seed: seed of the views.
        observes: whether a batch so many ahead needs its real input.
        load: loads tensors of samples of a batch.
        notices: takes messages.
        stats: counts what is done; None makes one.

    Attributes:
        stats: what was done so far.
        accounts: tell whether the cache pays.
        front: the frozen front; None if nothing is cached.
        levels: the cached boundaries.
        level_at: returns the one of a depth; None if there is none.
        keys: numbers of the computations seen so far.
        outside: tensors of the program.
    """

    def __init__(
        self,
        name: str,
        dataset: PlannedDataset,
        directory: CacheDirectory,
        limits: Limits,
        views: int,
        seed: int,
        observes: Callable[[int], bool],
        load: Callable[[Loaded, list[tuple[int, int]]], list[Tensor]],
        notices: Notices,
        stats: CacheStats | None = None,
    ) -> None:
        self.stats = stats if stats is not None else CacheStats()
        self.front: Front | None = None
        self.keys, self.outside = Keys(), Outside()
        self.levels = LevelSet(directory, limits, self.stats, notices, dataset.close)
        self.level_at = self.levels.at
        self._name, self._dataset, self._views, self._load, self._notices = name, dataset, views, load, notices
        self._planner = Planner(dataset, self.levels, views, seed, observes, notices)
        self._trials = Trials(name, dataset, self._planner, self.levels, self.outside, views, seed)
        self.accounts = Accounts(self.stats)
        self._epoch, self._fronts, self._differences = 0, 0, 0
        self._epochs: int | None = None
        self._forget_front()

    def _forget_front(self) -> None:
        self._habits = Habits()
        self._trials.begin_front()
        self._moved = self._unlike = 0
        self._renewals = self.front.renewals if self.front is not None else 0

    def start(self, front: Front | None, keep: bool) -> None:
        """Another front is frozen; None: none. ``keep`` what was cached if the front only became deeper."""
        self.levels.reader.cancel()
        if not keep:
            self.levels.drop()
            self._differences = 0
        self.front = front
        self._fronts += 1
        self._forget_front()
        self._planner.begin_front(front)
        self.accounts.restart()
        self.stats.depth = self.levels.all[-1].depth if self.levels else 0
        self.stats.off = None if front is not None else "nothing is frozen"

    def stop(self, reason: str, once: str | None = None) -> None:
        """Cache nothing more until another front is frozen; warn, for one problem of all streams only ``once``."""
        self.levels.drop()
        self.front = None
        self.stats.depth = 0
        self.stats.off = reason
        self._notices.warn(f"the cache of {self._name} is off: {reason}", once=once or reason)

    def front_is_unchanged(self) -> bool:
        """Whether weights, buffers and modes of the front are those that entries were computed by."""
        return self.front is not None and self.front.state.is_same()

    @property
    def writes(self) -> bool:
        """Whether what is computed now becomes an entry: there is room, and it may be read before the run ends."""
        read_again = self._epochs is None or self._epoch + max(1, self._views) < self._epochs
        return read_again and self.levels.recording.active

    @property
    def sizes(self) -> BatchSizes:
        """Sizes of batches whose rows have the same bits."""
        return self._planner.sizes

    def begin_epoch(self, epoch: int, epochs: int | None, has_workers: bool) -> None:
        """The loader begins anew; batches that were planned and did not come will not.

        Args:
            epoch: number of the epoch.
            epochs: number of all epochs, if each of them has every sample once at most; None if nobody knows.
            has_workers: whether other processes load.
        """
        self._epoch, self._epochs, self.accounts.loads_ahead = epoch, epochs, has_workers
        self._planner.begin_epoch(epoch, self.front is not None, has_workers)
        self.accounts.race.new_pass()
        self.levels.begin_epoch()

    def plan(self, ids: Sequence[Any]) -> Plan:
        """Plan the next batch."""
        if self.front is not None and (self.front.renewals != self._renewals or self._trials.has_outgrown):
            self._begin_anew(self.front)
        try:
            return self._planner.plan(ids, self.front, self._fronts, self.accounts.race.takes)
        except CacheError as error:
            self.stop(str(error))
            return self._planner.plan(ids, None, self._fronts, self.accounts.race.takes)

    def plan_again(self, ids: Sequence[Any], reads: bool) -> Plan | None:
        """Plan a batch of samples that are there already, with or without reads of entries; None: it is not cached."""
        if self.front is None or self.front.renewals != self._renewals or self.level_at(self.front.depth) is None:
            return None
        return self._planner.plan_again(ids, self.front, self._fronts, reads)

    def keep_samples(self) -> None:
        """Have batches come with their samples, from the next plan on."""
        self._planner.keeps_samples = True

    def last_look(self, plan: Plan) -> Plan:
        """Return a plan that was made ahead, as it is right now: samples that are in doubt by now are loaded."""
        return self._planner.last_look(plan) if self.front is not None else plan

    def forget_verified(self, ids: Rows | None = None) -> None:
        """Compare entries with their samples before they are used again; all entries by default."""
        self.levels.forget_verified(ids, self._views)

    def forget(self, level: Level, entries: Rows, doubt: bool) -> None:
        """Make misses of entries whose samples have changed; ``doubt`` all others if that could not be seen."""
        self.levels.forget(level, entries)
        if doubt:
            self._planner.doubt_samples()

    def receive(self, loaded: Loaded, waited: float) -> tuple[Any, CachedBatch | None]:
        """Return the user's batch, and the batch under the cache; None for one without."""
        plan = loaded.plan
        reads = self._planner.received(loaded)
        if loaded.together and self.front is not None:
            self.stop("the dataset's __getitems__ makes batches, whose samples are not those of its __getitem__")
        if self.front is not None and (plan.mode is Mode.PLAIN or plan.front != self._fronts):
            self.stats.misses += len(plan.ids)
        if plan.mode is Mode.PLAIN:
            return loaded.batch, None
        front = self.front if plan.front == self._fronts else None
        batch = CachedBatch(self, front, loaded, reads, waited)
        given, batch.batch = batch.batch, None  # what the program does not hold must not seem to be held
        return given, batch

    def load(self, batch: CachedBatch, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load tensors of samples."""
        with self.accounts.spending():
            return self._load(batch.loaded, places)

    def judge_length(self, level: Level, node: Node) -> None:
        """Find out whether entries of a level serve batches of other lengths, unless that is known."""
        judge_length(level, self.outside, node, self._notices)

    def computed(self, batch: CachedBatch, node: Node, value: Tensor, some: Some | None = None) -> None:
        """The output at the deepest boundary was computed, of all samples or some: try, compare or record it."""
        front = self.front
        if front is None:
            return
        if batch.eager:
            with self.accounts.spending():
                self._finish_trial(batch, node, value, front)
            return
        level = self.level_at(front.depth)
        some = some if some is not None else Some(np.arange(batch.samples))
        if level is None or node.key != level.key or value.shape[:1] != some.places.shape:
            return
        if not self.front_is_unchanged():
            self._front_moved(front)
            return
        self._moved = 0
        if self.sizes.verdict(batch.samples) is None:
            self._compare(batch, level, value)
        if self.sizes.verdict(batch.samples):
            self._record(batch, level, node, value, some)

    def differs(self, samples: int) -> None:
        """The front computes something else than the entries of so many samples say: none of them is trusted."""
        self.stats.wrong += samples
        self._differences += 1
        text = "entries differ from what the frozen layers compute"
        if self._differences >= DIFFERENCES_TO_STOP or self.front is None:
            self.stop(f"{text}: samples or layers change where the cache cannot see it")
            return
        self._notices.warn(f"{text}, so all are dropped, and computed anew", once=f"{text} of {self._name}")
        self._trials.only_here = True  # or the same store would be opened again
        self._begin_anew(self.front)

    def finish(self, batch: CachedBatch) -> None:
        """The batch is over."""
        front = self.front
        if front is None or batch.front is not front:
            return
        if batch.eager and not batch.calls:
            hint = "(a table of positions? Freeze one layer module more)"
            missing = f"{front.units[-1].path!r} was not called with tensors of the batch {hint}"
            try:
                self._trials.shows_nothing(front.refused or missing)
            except CacheError as error:
                self.stop(str(error))
            return
        self.accounts.count(batch)
        if self.level_at(front.depth) is None:
            return
        if (reason := self._habits.why_stop(batch, front)) is not None:
            self.stop(reason)
            return
        if (reader := self._habits.reader) is not None and self._planner.leaves_out:
            self._planner.load_all(f"{reader} reads the input in most batches, so samples are loaded again")
            self.accounts.race_again()  # so far they were loaded late
        if batch.other_shape is not None:
            text = f"an output of shape {batch.other_shape} has no place among entries of the shape of the first batch"
            self._notices.inform(f"{text}. Give all samples one size", once=f"shapes of {self._name}")
        judgement = self.accounts.judgement(front.device)
        if judgement is not None and not judgement[0]:
            self.stop(f"it does not pay: {judgement[1]}")
        elif judgement is not None:
            self._notices.inform(f"the cache of {self._name} pays: {judgement[1]}")

    def dropped(self, batch: CachedBatch) -> None:
        """The batch does not run."""
        self._planner.trial_planned &= not batch.eager

    def touched_late(self, batch: CachedBatch) -> None:
        """The program reads inputs after the end of their batch."""
        self.accounts.touched_late(batch)
        self._habits.touched(batch)

    def close(self, remove: bool = False) -> None:
        """Stop reading and writing; ``remove`` the stores too, or leave them on disk. Safe to call twice."""
        self.front = None
        self.levels.close(remove)

    def progress_text(self) -> str | None:
        """How much of the deepest level is there, in words; None while nothing is cached, and when all of it is."""
        return self.levels.progress_text() if self.front is not None else None

    def _compare(self, batch: CachedBatch, level: Level, value: Tensor) -> None:
        """Compare entries with what the front computed in a batch of another size."""
        stored = batch.rows(level, value.shape[1] if level.form.ragged else 1)
        if stored is None:
            return
        same = same_bits(stored.to(value.device), level.form.rounded(value))
        if self.sizes.compared(batch.samples, same) is False:
            self._notices.inform(
                f"rows in batches of {batch.samples} differ in their last bits, so these batches are not cached"
            )

    def _front_moved(self, front: Front) -> None:
        """The weights of the front are not those of the entries: begin anew with these, if they stay."""
        self._moved += 1
        if self._moved < MOVED:
            return
        if front.renewals >= CHANGES_TO_STOP:
            self.stop("the frozen layers keep changing")
            return
        if self._name == "training":
            self._notices.warn("the frozen layers have changed, so their outputs are cached anew", once="changed")
        front.renew()
        self._begin_anew(front)

    def _begin_anew(self, front: Front) -> None:
        self.levels.drop()
        self._forget_front()
        self._planner.begin_front(front)
        self.accounts.restart()
        self.stats.depth = 0

    def _finish_trial(self, batch: CachedBatch, node: Node, value: Tensor, front: Front) -> None:
        if self.level_at(front.depth) is not None:
            return
        try:
            text = self._trials.open(batch, node, value, front)
        except (CacheError, StoreError) as error:
            self.stop(str(error), once="the disk" if isinstance(error, StoreError) else None)
            return
        if text is None:
            return
        self.stats.depth = front.depth
        self._notices.inform(text)
        self._record(batch, self.levels.all[-1], node, value, Some(np.arange(batch.samples)))
        if not self._trials.exact:
            text = "the last bits of a sample's output depend on its place in the batch"
            self._notices.inform(f"{text}; they may differ from a run without the cache")

    def _record(self, batch: CachedBatch, level: Level, node: Node, value: Tensor, some: Some) -> None:
        """Write the output of some samples, if it may be read again."""
        if not self.writes or batch.plan.doubts != self.levels.doubts:
            return
        value, same = with_padding(batch, level, node, value, some, self.outside, self._notices)
        made = self.outside.stamps(node, level.form.ragged)
        self._unlike = 0 if batch.hits or bool(same.any()) else self._unlike + 1
        if self._unlike >= UNLIKE:
            self.stop(f"no text of the last {UNLIKE} batches had the same output with other padding")
        if made is None or self.front is None:
            return
        judge_folding(self.front, level, node, self.outside)
        value, places = value[same.to(value.device)], some.places[same.numpy()]
        fields, lazy = [batch.fields[place] for place in places], [batch.lazy[place] for place in places]
        self.levels.recording.write(self.levels.all, batch.entries[places], value, fields, lazy, made[places])
