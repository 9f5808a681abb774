"""What to load for each batch: which samples have entries, and which are loaded whole."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightning_egeria.caching.front import Front
from lightning_egeria.caching.level_set import LevelSet
from lightning_egeria.caching.levels import Level
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.outputs import BatchSizes, Read
from lightning_egeria.caching.plan import Loaded, Mode, Plan
from lightning_egeria.errors import CacheError
from lightning_egeria.snapshots.contents import changed, digests_of
from lightning_egeria.stores.rows import Rows
from lightning_egeria.training.notices import Notices

CHECK_EVERY_N_BATCHES = 200
FIRST_CHECK = 20
CHECKED_SHARE = 8  # of a batch, an eighth, is compared in the first batch of an epoch
LEAST_CHECKED = 2  # samples
LEAST_RETURNED = 16  # samples that must be the same again before any is left out
QUICK_S = 0.0005  # a look at the dataset that takes less is taken before each batch


class Planner:
    """Plans the batches of one loader.

    Args:
        dataset: the user's dataset, asked for planned batches.
        levels: the cached boundaries.
        views: variants of each sample to cache; 0 loads samples as they come.
        seed: seed of the views.
        observes: whether a batch so many ahead needs its real input.
        notices: takes messages.

    Attributes:
        sizes: sizes of batches that entries may be used in.
        inputs: numbers of the tensors of a sample that only the front reads.
        structure: structure of a sample.
        leaves_out: whether the inputs of cached samples are left out.
        trial_planned: a batch for a trial is on its way.
        keeps_samples: whether batches come with their samples.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        levels: LevelSet,
        views: int,
        seed: int,
        observes: Callable[[int], bool],
        notices: Notices,
    ) -> None:
        self.sizes = BatchSizes()
        self.inputs: tuple[int, ...] = ()
        self.structure: Any = None
        self.leaves_out = True
        self.trial_planned = self.keeps_samples = False
        self._dataset, self._levels, self._notices = dataset, levels, notices
        self._views, self._seed, self._observes = views, seed, observes
        self._reads: dict[int, list[Read]] = {}
        self._next, self._received, self._largest, self._epoch = 0, -1, 0, 0
        self._since_check, self._checked = 0, False
        self._numbers: dict[Any, int] | None = None  # of ids that are not indices
        self._seen_indices = False
        self._data: dict[str, str] = {}
        self._data_seconds, self._has_copies = 1.0, False

    @property
    def has_own_ids(self) -> bool:
        """Whether ids are not indices, so that their numbers are those of this run only."""
        return self._numbers is not None

    def begin_front(self, front: Front | None) -> None:
        """Another front is frozen, or the same with other weights; None: none."""
        if not self._levels:
            self.inputs, self.structure = (), None
        self.sizes = BatchSizes()
        self.trial_planned, self._since_check = False, 0
        if self._has_copies:
            return  # it was looked at when they were made
        if len(self._levels):
            self.look_at_data()  # entries of before may be of other data
        else:
            self._data = digests_of(self._dataset.dataset) if front is not None else {}

    def begin_epoch(self, epoch: int, has_front: bool, has_copies: bool) -> None:
        """Batches that were planned and did not come will not; workers that ``has_copies`` load as the data is now."""
        self._epoch, self._has_copies = epoch, has_copies
        if has_front or has_copies:
            self.look_at_data()
        self._reads.clear()
        self.trial_planned, self._checked = False, False

    def look_at_data(self) -> None:
        """Compare what the dataset holds with what it held before."""
        started = time.perf_counter()
        data = digests_of(self._dataset.dataset)
        self._data_seconds = time.perf_counter() - started
        name, self._data = changed(self._data, data), data
        if name is not None and len(self._levels):
            text = f"the dataset's attribute {name!r} changed, so samples are loaded and compared with their entries"
            self._notices.inform(text, once="data")
            self._levels.forget_verified(None, self._views)

    def plan(self, ids: Sequence[Any], front: Front | None, fronts: int, is_plain: Callable[[int], bool]) -> Plan:
        """Plan the next batch.

        Args:
            ids: sample ids.
            front: the frozen front; None if nothing is cached.
            fronts: number of the front.
            is_plain: whether a batch of a number runs without the cache although its entries are there.

        Raises:
            CacheError: the ids cannot be numbered.
        """
        self._largest = max(self._largest, len(ids))
        plan, entries = self._begun(ids, front, fronts)
        if front is None:
            return plan
        observed = self._observes(plan.number - self._received)
        if self._levels.at(front.depth) is not None:
            if is_plain(plan.number):
                return plan
            return self._plan_whole(plan) if observed else self._plan_reads(plan, entries, front)
        if self.trial_planned or len(plan.ids) < self._largest:
            return self._plan_reads(plan, entries, front) if len(self._levels) else plan
        self.trial_planned = True
        return dataclasses.replace(plan, mode=Mode.TRIAL)

    def plan_again(self, ids: Sequence[Any], front: Front, fronts: int, reads: bool) -> Plan:
        """Plan a batch of samples that are there already.

        Args:
            ids: as in `plan`.
            front: as in `plan`.
            fronts: as in `plan`.
            reads: whether entries are read.
        """
        plan, entries = self._begun(ids, front, fronts)
        if reads:
            return self._plan_reads(plan, entries, front, checks=False)
        return self._plan_whole(plan)

    def last_look(self, plan: Plan) -> Plan:
        """Return a plan that was made ahead, as it is right now: samples that are in doubt by now are loaded."""
        if plan.mode is not Mode.FOLLOWED or not plan.stored:
            return plan
        if self._data_seconds < QUICK_S and not self._has_copies:
            self.look_at_data()
        entries, stored = np.array(plan.entries, np.int64), np.array(plan.stored)
        for number, folder in enumerate(plan.stores):
            level = self._levels.of(folder)
            doubtful = ~level.verified[entries] if level is not None else np.ones(len(entries), bool)
            stored[(stored == number) & doubtful] = -1
        return dataclasses.replace(plan, stored=tuple(stored.tolist()))

    def received(self, loaded: Loaded) -> list[Read]:
        """A planned batch is there; return the reads of its rows."""
        if loaded.drew is not None and not self._views:
            self.load_all(
                f"loading a sample changes {loaded.drew}, so every sample is loaded in each epoch. Only the frozen "
                "layers are skipped, for samples that come back unchanged. See augmentation_views"
            )
        if loaded.differ:
            self._notices.inform(
                "samples differ in their structure (lists of several lengths, or None?), so their batches are not "
                "cached. Give all samples the same fields",
                once="structure",
            )
        self._received = loaded.plan.number
        self._levels.reader.used(loaded.plan.number)
        return self._reads.pop(loaded.plan.number, [])

    def doubt_samples(self) -> None:
        """A sample has changed that was not in doubt: all are compared with their entries before these are used."""
        if self.leaves_out:
            self._levels.forget_verified(None, self._views)
        self.load_all(
            "samples change where the cache cannot see it (a generator of their own, or an attribute out of reach?), "
            "so they are loaded and compared with their entries"
        )

    def load_all(self, reason: str) -> None:
        """Leave out no more inputs, and tell why."""
        if self.leaves_out:
            self._notices.inform(reason)
        self.leaves_out = False

    def _numbers_of(self, ids: Sequence[Any]) -> list[int]:
        """Numbers of samples from their ids: an index is its own number, other ids are counted as they come."""
        count = len(self._dataset)
        with contextlib.suppress(TypeError):  # an index may be a tensor or an array with one number
            indices = [operator.index(one) for one in ids]
            if self._numbers is None and all(0 <= one < count for one in indices):
                self._seen_indices = True
                return indices
        self._numbers = self._numbers if self._numbers is not None else {}
        try:
            numbers = [self._numbers.setdefault(one, len(self._numbers)) for one in ids]
        except TypeError:
            raise CacheError(f"the sampler yields {type(ids[0]).__name__} objects, which cannot be hashed") from None
        if self._seen_indices or max(numbers, default=0) >= count:
            raise CacheError(f"the sampler yields more different ids than the {count} samples of the dataset")
        return numbers

    def _plan_whole(self, plan: Plan) -> Plan:
        """Load all samples, and read no entry."""
        return dataclasses.replace(plan, mode=Mode.FOLLOWED, inputs=self.inputs, structure=self.structure)

    def _plan_reads(self, plan: Plan, entries: Rows, front: Front, checks: bool = True) -> Plan:
        size = len(plan.ids)
        proven = self.sizes.verdict(size)
        if proven is False:
            return plan
        plan = self._plan_whole(plan)
        stored = np.full(size, -1)
        reads = self._reads[plan.number]
        levels = list(reversed(self._levels.all))
        for number, level in enumerate(levels):
            places = np.flatnonzero((stored < 0) & level.present(entries))
            if proven is None and len(places) < size:
                break  # rows of this size are compared, all of them
            if len(places):
                stored[places] = number
                reads.append(self._read(plan, level, places, entries, front))
        checked = self._places_to_check(stored) if checks and proven else np.empty(0, np.int64)
        plan = dataclasses.replace(plan, checks=tuple(checked.tolist()))
        new = all(level.returned < min(LEAST_RETURNED, len(self._dataset)) for level in levels)
        if not self.leaves_out or not self.inputs or proven is None or new:  # if samples are random, it shows first
            return plan
        stored[checked] = -1  # they are loaded
        stamps = np.zeros(size, np.uint64)
        for number, level in enumerate(levels):
            stored[(stored == number) & ~level.verified[entries]] = -1
            stamps = np.where(stored == number, level.stamps[entries, 0], stamps)
        folders = tuple(level.store.folder for level in levels)
        return dataclasses.replace(plan, stores=folders, stored=tuple(stored.tolist()), stamps=tuple(stamps.tolist()))

    def _begun(self, ids: Sequence[Any], front: Front | None, fronts: int) -> tuple[Plan, Rows]:
        """The next plan, with the entries of its samples if something is cached."""
        number, self._next = self._next, self._next + 1
        plan = Plan(number, tuple(ids), front=fronts, doubts=self._levels.doubts, keeps=self.keeps_samples)
        self._reads[number] = []
        if front is None:
            return plan, np.empty(0, np.int64)
        numbers = self._numbers_of(plan.ids)
        view = self._epoch % self._views if self._views else 0
        entries = np.array(numbers, np.int64) * max(1, self._views) + view
        seeds = tuple(seed_of(self._seed, one, view) for one in numbers) if self._views else None
        return dataclasses.replace(plan, entries=tuple(entries.tolist()), seeds=seeds), entries

    def _read(self, plan: Plan, level: Level, places: Rows, entries: Rows, front: Front) -> Read:
        """Begin to read the rows of some samples."""
        read = partial(level.read, entries[places], front.device.type == "cuda")
        return Read(level, places, self._levels.reader.submit(plan.number, read))

    def _places_to_check(self, stored: Rows) -> Rows:
        """Places with entries: some in the first such batch of an epoch, all in every 200th, none in others."""
        places = np.flatnonzero(stored >= 0)
        self._since_check += 1
        if self._since_check in (FIRST_CHECK, CHECK_EVERY_N_BATCHES):
            self._since_check %= CHECK_EVERY_N_BATCHES
            return places
        if self._checked or not len(places):
            return places[:0]
        self._checked = True
        count = max(LEAST_CHECKED, len(stored) // CHECKED_SHARE)
        # Of a loader in the same order in each epoch, other ones.
        return np.sort(np.roll(places, -self._epoch * count)[:count])


def seed_of(seed: int, sample_id: int, view: int) -> int:
    """Return the seed of one view of a sample's randomness: a hash, so that neighbours have nothing in common.

    >>> seed_of(0, 1, 0) != seed_of(0, 0, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {sample_id} {view}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
