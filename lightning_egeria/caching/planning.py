"""What to load for each batch, and what to read ahead, when its sample ids are drawn."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lightning_egeria.caching.background import ReadAhead
from lightning_egeria.caching.levels import Level, Rows
from lightning_egeria.caching.loading import Plan
from lightning_egeria.caching.steps import PlannedBatch, Read
from lightning_egeria.caching.terms import Terms

SPOT_CHECK_EVERY_N_BATCHES = 200
FIRST_SPOT_CHECK = 20


class Planner:
    """Plans batches and has their entries read.

    Args:
        views: how many variants of each sample are cached; 0: samples are loaded as they come.
        seed: of their randomness.
        observes: whether a batch so many ahead needs the network's real input.
    """

    def __init__(self, views: int, seed: int, observes: Callable[[int], bool]) -> None:
        self._views = views
        self._seed = seed
        self._observes = observes
        self._pin = False
        self._epoch = 0
        self._epochs: int | None = None
        self._next = 0
        self._largest = 0
        self._planned: dict[int, PlannedBatch] = {}
        self._received = -1
        self._since_check = 0
        self._examination_planned = False
        self._reader = ReadAhead()

    def plan(
        self, ids: Sequence[int], version: int, on: bool, terms: Terms | None, levels: Sequence[Level], records: bool
    ) -> Plan:
        """Plan the next batch.

        Args:
            ids: of its samples.
            version: of the frozen prefix.
            on: whether anything is to be cached.
            terms: on which activations stand for the prefix; None: a batch has to be examined first.
            levels: that are cached, the newest last.
            records: whether new entries are written.
        """
        number, self._next = self._next, self._next + 1
        self._largest = max(self._largest, len(ids))
        planned = PlannedBatch(Plan(number, tuple(ids), version))
        if on:
            planned = self._plan_cached(planned.plan, terms, levels, records)
        self._planned[number] = planned
        return planned.plan

    def take(self, number: int) -> PlannedBatch:
        """The batch has come."""
        planned = self._planned.pop(number)
        self._received = number
        self._reader.used(number)
        if planned.plan.examine:
            self._examination_planned = False
        return planned

    @property
    def is_read_again(self) -> bool:
        """Whether what is written now may be read before the run ends: a sample has the same view some epochs later."""
        return self._epochs is None or self._epoch + max(1, self._views) < self._epochs

    def begin_epoch(self, epoch: int, epochs: int | None) -> None:
        """Batches that were planned and did not come will not. The epoch, of so many, chooses the view."""
        self._epoch, self._epochs = epoch, epochs
        self._planned.clear()
        self._reader.cancel()
        self._examination_planned = False

    def restart(self, device: torch.device) -> None:
        """Another prefix is frozen, on this device."""
        self._pin = device.type == "cuda"
        self._since_check = 0
        self._examination_planned = False

    def forget_rows(self) -> None:
        """Entries that were read, or are being read, may be of another sample than was thought."""
        self._reader.cancel()
        for planned in self._planned.values():
            planned.reads.clear()

    def close(self) -> None:
        """End the reading. Safe to call twice."""
        self._reader.close()
        self._planned.clear()

    def _plan_cached(self, plan: Plan, terms: Terms | None, levels: Sequence[Level], records: bool) -> PlannedBatch:
        ids = np.asarray(plan.ids, np.int64)
        view = self._epoch % self._views if self._views else 0
        entries = ids * max(1, self._views) + view
        seeds = tuple(seed_of(self._seed, int(i), view) for i in ids) if self._views else None
        plan = dataclasses.replace(plan, entries=tuple(entries.tolist()), seeds=seeds)
        if terms is None:
            if self._examination_planned or len(ids) < self._largest:
                return PlannedBatch(plan)
            self._examination_planned = True
            return PlannedBatch(dataclasses.replace(plan, examine=True))
        checks = self._is_spot_check()
        stored, doubtful = np.full(len(ids), -1), False
        reads: list[Read] = []
        for number in reversed(range(len(levels))):
            level = levels[number]
            places = np.flatnonzero((stored < 0) & level.present(entries))
            if len(places):
                stored[places] = number
                doubtful = doubtful or bool(level.is_doubtful(entries[places]).any())
                reads.append(self._begin_read(plan.number, level, places, entries[places]))
        whole = checks or doubtful or self._observes(plan.number - self._received) or not terms.is_proven(len(ids))
        plan = dataclasses.replace(
            plan,
            stores=tuple(level.store.folder for level in levels),
            stored=tuple((np.full(len(ids), -1) if whole else stored).tolist()),
            input_field=terms.input_field,
            structure=terms.structure,
            length_leaf=terms.length_leaf,
            keep=terms.input_field is not None
            and ((records and bool((stored != len(levels) - 1).any())) or checks or doubtful),
        )
        return PlannedBatch(plan, reads, checks)

    def _begin_read(self, number: int, level: Level, places: Rows, entries: Rows) -> Read:
        if level.device.holds(entries).all():
            return Read(level, places, entries, None)
        return Read(level, places, entries, self._reader.submit(number, lambda: level.read(entries, self._pin)))

    def _is_spot_check(self) -> bool:
        self._since_check += 1
        if self._since_check in (FIRST_SPOT_CHECK, SPOT_CHECK_EVERY_N_BATCHES):
            self._since_check %= SPOT_CHECK_EVERY_N_BATCHES
            return True
        return False


def seed_of(seed: int, sample_id: int, view: int) -> int:
    """Seed of one view of one sample's randomness: a hash, so that neighbours have nothing in common.

    >>> seed_of(0, 1, 0) != seed_of(0, 0, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {sample_id} {view}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
