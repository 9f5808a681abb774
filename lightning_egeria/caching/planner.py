"""What to load for each batch: which samples have entries, and which are loaded whole."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from lightning_egeria.caching import policy
from lightning_egeria.caching.entries import CachedValue, CachedValues, Found
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.plan import Loaded, Mode, Plan
from lightning_egeria.caching.serve import Read
from lightning_egeria.caching.store.rows import Rows
from lightning_egeria.core.snapshots.contents import Contents, changed
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import CacheError

QUICK_S = 0.0005  # a look at the dataset that takes less is taken before each batch


class Planner:
    """Plans the batches of one loader.

    Args:
        dataset: the user's dataset, asked for planned batches.
        values: the cached values.
        views: variants of each sample to cache; 0 loads samples as they come.
        seed: seed of the views.
        observes: whether the batch that many ahead needs its real input.
        notices: takes messages.

    Attributes:
        inputs: numbers of the tensors of a sample that frozen modules read.
        structure: structure of a sample.
        leaves_out: whether the inputs of cached samples are left out.
        keeps_samples: whether batches come with their samples.
        largest: samples of the largest batch so far.
        pins: whether rows are read into memory that a GPU reads fast.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        values: CachedValues,
        views: int,
        seed: int,
        observes: Callable[[int], bool],
        notices: Notices,
    ) -> None:
        self.inputs: tuple[int, ...] = ()
        self.structure: Any = None
        self.leaves_out = True
        self.keeps_samples = False
        self._dataset, self._values, self._notices = dataset, values, notices
        self._views, self._seed, self._observes = views, seed, observes
        self._reads: dict[int, list[Read]] = {}
        self._next, self._received, self.largest, self._epoch = 0, -1, 0, 0
        self._served = self._checked = 0  # rows
        self.pins = False
        self._numbers: dict[Any, int] | None = None  # of ids that are not indices
        self._seen_indices = False
        self._data: Contents | None = None
        self._data_seconds, self._has_copies = 1.0, False

    @property
    def has_own_ids(self) -> bool:
        """Whether ids are not indices, so that their numbers are those of this run only."""
        return self._numbers is not None

    def begin_frozen(self, frozen: object | None) -> None:
        """Other modules are frozen, or the same with other weights; None: none."""
        if not len(self._values):
            self.inputs, self.structure = (), None
        self._served = self._checked = 0
        if self._has_copies:
            return  # it was looked at when they were made
        if len(self._values):
            self.look_at_data()  # entries of before may be of other data
        else:
            self._data = Contents(self._dataset.dataset) if frozen is not None else None

    def begin_epoch(self, epoch: int, has_frozen: bool, has_copies: bool) -> None:
        """Batches that were planned and did not come will not; workers that ``has_copies`` load as the data is now."""
        self._epoch, self._has_copies = epoch, has_copies
        if has_frozen or has_copies:
            self.look_at_data()
        self._reads.clear()

    def look_at_data(self) -> None:
        """Compare what the dataset holds with what it held before."""
        started = time.perf_counter()
        before = self._data
        if before is None or not before.are_same():
            self._data = Contents(self._dataset.dataset)
        self._data_seconds = time.perf_counter() - started
        if before is None or before is self._data or self._data is None:
            return
        name = changed(before.digests, self._data.digests)
        if name is not None and len(self._values):
            text = f"the dataset's attribute {name!r} changed, so samples are loaded and compared with their entries"
            self._notices.inform(text, once="data")
            self._values.forget_verified(None, self._views)

    def plan(self, ids: Sequence[Any], cached: bool, version: int, is_plain: Callable[[int], bool]) -> Plan:
        """Plan the next batch.

        Args:
            ids: sample ids.
            cached: whether something is frozen, and cached.
            version: number of the set of frozen modules.
            is_plain: whether a batch of a number runs without the cache although its entries are there.

        Raises:
            CacheError: the ids cannot be numbered.
        """
        self.largest = max(self.largest, len(ids))
        plan, entries = self._begun(ids, cached, version)
        if not cached:
            return plan
        observed = self._observes(plan.number - self._received)
        if len(self._values):
            if is_plain(plan.number):
                return plan
            return self._plan_whole(plan) if observed else self._plan_reads(plan, entries)
        if observed or len(plan.ids) < self.largest:
            return plan
        return dataclasses.replace(plan, mode=Mode.PROBE)

    def plan_again(self, ids: Sequence[Any], version: int, reads: bool) -> Plan:
        """Plan a batch of samples that are there already.

        Args:
            ids: as in `plan`.
            version: as in `plan`.
            reads: whether entries are read.
        """
        plan, entries = self._begun(ids, True, version)
        return self._plan_reads(plan, entries, checks=False) if reads else self._plan_whole(plan)

    def last_look(self, plan: Plan) -> Plan:
        """Refresh a plan that was made ahead: load samples that have become doubtful since."""
        if plan.mode is not Mode.FOLLOWED or not plan.stored:
            return plan
        if self._data_seconds < QUICK_S and not self._has_copies:
            self.look_at_data()
        entries, stored = np.array(plan.entries, np.int64), np.array(plan.stored)
        for number, folder in enumerate(plan.stores):
            level = self._values.in_folder(folder)
            doubtful = ~level.verified[entries] if level is not None else np.ones(len(entries), bool)
            stored[(stored == number) & doubtful] = -1
        kept = tuple(stored.tolist())
        return plan if kept == plan.stored else dataclasses.replace(plan, stored=kept)

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
        self._values.reader.used(loaded.plan.number)
        return self._reads.pop(loaded.plan.number, [])

    def doubt_samples(self) -> None:
        """A sample has changed that was not in doubt: all are compared with their entries before these are used."""
        if self.leaves_out:
            self._values.forget_verified(None, self._views)
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

    def _plan_reads(self, plan: Plan, entries: Rows, checks: bool = True) -> Plan:
        size = len(plan.ids)
        reads = self._reads[plan.number]
        proven = True
        covered = np.ones(size, bool)  # by an entry of each value that the program asks for
        source = np.full(size, -1)  # value that has the fields of a sample
        values = list(reversed(self._values.all))
        for number, value in enumerate(values):
            verdict = value.sizes.verdict(size)
            if verdict is False:
                continue
            present = value.present(entries)
            if verdict is None:
                proven = False
                if not present.all():
                    continue  # rows of this size are compared, all of them
            if value.asked >= self._epoch - 1 and not self._values.is_superseded(value):
                covered &= present | self._values.older_has(value, entries)
            places = np.flatnonzero(present)
            if len(places):
                source[places] = np.where(source[places] < 0, number, source[places])
                reads.append(self._read(plan, value, places, entries))
        source[~covered] = -1
        checked = self._places_to_check(source) if checks and proven else np.empty(0, np.int64)
        found: dict[str, Any] = {"mode": Mode.FOLLOWED, "inputs": self.inputs, "structure": self.structure}
        found["checks"] = tuple(checked.tolist())
        new = all(value.returned < min(policy.LEAST_RETURNED, len(self._dataset)) for value in values)
        if not self.leaves_out or not self.inputs or not proven or new:  # if samples are random, it shows first
            return dataclasses.replace(plan, **found)
        source[checked] = -1  # they are loaded
        stamps = np.zeros(size, np.uint64)
        doubtful = np.zeros(size, bool)
        for number, value in enumerate(values):
            doubtful |= value.present(entries) & ~value.verified[entries]
            stamps = np.where(source == number, value.stamps[entries, 0], stamps)
        source[doubtful] = -1
        folders = tuple(value.store.folder for value in values)
        found |= {"stores": folders, "stored": tuple(source.tolist()), "stamps": tuple(stamps.tolist())}
        return dataclasses.replace(plan, **found)

    def _begun(self, ids: Sequence[Any], cached: bool, version: int) -> tuple[Plan, Rows]:
        """The next plan, with the entries of its samples if something is cached."""
        number, self._next = self._next, self._next + 1
        begun = functools.partial(
            Plan, number, tuple(ids), version=version, doubts=self._values.doubts, keeps=self.keeps_samples
        )
        self._reads[number] = []
        if not cached:
            return begun(), np.empty(0, np.int64)
        numbers = self._numbers_of(ids)
        view = self._epoch % self._views if self._views else 0
        entries = np.array(numbers, np.int64) * max(1, self._views) + view
        seeds = tuple(seed_of(self._seed, one, view) for one in numbers) if self._views else None
        return begun(entries=tuple(entries.tolist()), seeds=seeds), entries

    def _read(self, plan: Plan, value: CachedValue, places: Rows, entries: Rows) -> Read:
        """Begin to read the rows of some samples."""
        found = value.in_memory(entries[places], self.pins)
        if found is None:
            return Read(value, places, self._values.read_ahead(plan.number, value, entries[places], self.pins))
        future: Future[Found] = Future()
        future.set_result(found)
        return Read(value, places, future)

    def _places_to_check(self, source: Rows) -> Rows:
        """Places of samples whose entries are compared with what is computed: few, in few batches."""
        places = np.flatnonzero(source >= 0)
        self._served += len(places)
        if not len(places) or not policy.checks(self._served, self._checked, len(source)):
            return places[:0]
        self._checked += len(source)
        return places


def seed_of(seed: int, sample_id: int, view: int) -> int:
    """Return the seed of one view of a sample's randomness: a hash, so that neighbours have nothing in common.

    >>> seed_of(0, 1, 0) != seed_of(0, 0, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {sample_id} {view}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
