"""The batches of one loader, from their plans to their ends: what is cached of them, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_egeria.caching.background import ReadAhead
from lightning_egeria.caching.batch import CachedBatch, Read
from lightning_egeria.caching.data_state import changed, digests_of
from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.front import Front
from lightning_egeria.caching.levels import Level, MemoryTier, RowForm, Rows
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.plan import Loaded, Mode, Plan
from lightning_egeria.caching.recording import Limits, Recording, bytes_on_disk
from lightning_egeria.caching.samples import without_inputs
from lightning_egeria.caching.stats import Accounts, CacheStats
from lightning_egeria.caching.store import FORMAT, Manifest, StoreError
from lightning_egeria.caching.tape import Keys, Node
from lightning_egeria.caching.trial import is_rounding, same_bits, smaller_sizes, try_boundary
from lightning_egeria.errors import CacheError
from lightning_egeria.training.notices import Notices

CHECK_EVERY_N_BATCHES = 200
FIRST_CHECK = 20
TRIALS = 10  # batches that may show nothing, before the cache stops
COUNTED = 20  # lazy batches, before it is decided whether inputs are left out and where the boundary is
COUNT_EVERY_S = 1.0
AGREEING = 2  # batches of another size with the bits of the entries, before it is used
QUICK_S = 0.0005  # a look at the dataset that takes less is taken before each batch
MOVED = 3  # batches in a row with another front, before it is taken for the front
OTHER = 6  # batches in a row that call the frozen layers in another way, before the cache stops
STRANGE = 20  # batches in a row without a match, before the cache stops
FIELD_SLACK = 2  # encoded fields may be so many times as long as the longest of the first batch
CHANGES_TO_STOP = 3


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
        load_elsewhere: loads tensors of samples in a process like the loader's workers; None loads them in this one.
        notices: takes messages.
        stats: counts what is done; None makes one.

    Attributes:
        stats: what was done so far.
        front: the frozen front; None if nothing is cached.
        levels: cached boundaries, the deepest last.
        keys: numbers of the computations seen so far.
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
        load_elsewhere: Callable[[Plan, list[tuple[int, int]]], list[Tensor]] | None,
        notices: Notices,
        stats: CacheStats | None = None,
    ) -> None:
        self.stats = stats if stats is not None else CacheStats()
        self.front: Front | None = None
        self.levels: list[Level] = []
        self.keys = Keys()
        self._name, self._dataset, self._directory, self._limits = name, dataset, directory, limits
        self._views, self._seed, self._observes = views, seed, observes
        self._load_elsewhere = load_elsewhere
        self._notices = notices
        self._recording = Recording(limits, self.stats, lambda text, cause: notices.warn(text, once=cause))
        self._reader = ReadAhead()
        self._accounts = Accounts(self.stats)
        self._planned: dict[int, list[Read]] = {}
        self._next, self._received, self._largest = 0, -1, 0
        self._epoch = 0
        self._is_first = True  # the first batch of an epoch reads all weights of the front
        self._epochs: int | None = None
        self._fronts = 0
        self._recorded, self._counted_at = 0.0, 0.0
        self._data: dict[str, str] = {}
        self._numbers: dict[Any, int] | None = None  # of ids that are not indices
        self._seen_indices = False
        self._leaves_out = True
        self._data_seconds, self._told_of_data = 1.0, False
        self._dropped: list[Path] = []
        self._forget_front()

    def _forget_front(self) -> None:
        self._trials, self._trial_planned, self._strange, self._changes = 0, False, 0, 0
        self._other = 0
        self._since_check = self._lazy_batches = self._touches = 0
        self._inputs: tuple[int, ...] = ()
        self._structure: Any = None
        self._sizes: dict[int, bool] = {}
        self._agreed: dict[int, int] = {}
        self._smaller: list[int] = []
        self._exact = True
        self._reruns = [0, 10**9]
        self._moved = 0
        self._renewals = self.front.renewals if self.front is not None else 0

    # --- the front ----------------------------------------------------------------------------------------------------

    def start(self, front: Front | None, keep: bool) -> None:
        """Another front is frozen; None: none. ``keep`` what was cached if the front only became deeper."""
        self._reader.cancel()
        if not keep:
            self._drop(self.levels)
        self.front = front
        self._fronts += 1
        structure, inputs = self._structure, self._inputs
        self._forget_front()
        if self.levels:
            self._structure, self._inputs = structure, inputs
        self._accounts.restart()
        self.stats.depth = self.levels[-1].depth if self.levels else 0
        self.stats.off = None if front is not None else "nothing is frozen"
        self._data = digests_of(self._dataset.dataset) if front is not None else {}

    def stop(self, reason: str, once: str | None = None) -> None:
        """Cache nothing more until another front is frozen; warn, for one problem of all streams only ``once``."""
        self._drop(self.levels)
        self.front = None
        self.stats.depth = 0
        self.stats.off = reason
        self._notices.warn(f"the cache of {self._name} is off: {reason}", once=once or reason)

    def front_is_unchanged(self) -> bool:
        """Whether weights, buffers and modes of the front are those that entries were computed by."""
        if self.front is None:
            return False
        first, self._is_first = self._is_first, False
        return self.front.state.is_unchanged(fully=first) or self.front.state.is_same()

    def level_at(self, depth: int) -> Level | None:
        """Return the level of a boundary."""
        return next((level for level in self.levels if level.depth == depth), None)

    def is_proven(self, size: int) -> bool:
        """Whether rows in batches of this size have the same bits as in the first one."""
        return self._sizes.get(size, False)

    def size_for(self, count: int, size: int) -> int:
        """Return a size to compute some rows in, with the same bits as in a batch of ``size``."""
        return min((one for one in self._smaller if count <= one < size), default=size)

    # --- planning -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, epochs: int | None) -> None:
        """The loader begins anew; batches that were planned and did not come will not.

        Args:
            epoch: number of the epoch.
            epochs: number of all epochs, if each of them has every sample once at most; None if nobody knows.
        """
        self._epoch, self._epochs = epoch, epochs
        self._is_first = True
        self._reader.cancel()
        self._planned.clear()
        self._trial_planned = False
        self._remove_dropped()
        for level in self.levels:
            with contextlib.suppress(StoreError, OSError):  # then its entries are missing one by one
                level.store.refresh()
        if len(self.levels) > 1:
            newest = self.levels[-1].store.index != 0
            done = [one for one in self.levels[:-1] if not ((one.store.index != 0) & ~newest).any()]
            self._drop(done)
        if self.front is not None:
            self._look_at_data()

    def _look_at_data(self) -> None:
        """Compare what the dataset holds with what it held before."""
        started = time.perf_counter()
        data = digests_of(self._dataset.dataset)
        self._data_seconds = time.perf_counter() - started
        name, self._data = changed(self._data, data), data
        if name is not None and self.levels:
            if not self._told_of_data:
                self._told_of_data = True
                self._notices.inform(
                    f"the dataset's attribute {name!r} changed, so samples are loaded and compared with their entries"
                )
            self.forget_verified()

    def last_look(self, plan: Plan) -> Plan:
        """Return a plan that was made ahead, as it is right now: samples that are in doubt by now are loaded."""
        if self.front is None or plan.mode is not Mode.FOLLOWED or not plan.stored:
            return plan
        if self._data_seconds < QUICK_S:
            self._look_at_data()
        entries, stored = np.array(plan.entries, np.int64), np.array(plan.stored)
        for number, folder in enumerate(plan.stores):
            level = next((one for one in self.levels if one.store.folder == folder), None)
            doubtful = ~level.verified[entries] if level is not None else np.ones(len(entries), bool)
            stored[(stored == number) & doubtful] = -1
        return dataclasses.replace(plan, stored=tuple(stored.tolist()))

    def forget_verified(self, ids: Rows | None = None) -> None:
        """Compare entries with their samples before they are used again; all entries by default."""
        views = max(1, self._views)
        self._recording.finish()  # an entry that is written later would count as compared
        for level in self.levels:
            level.verified.reshape(-1, views)[slice(None) if ids is None else ids] = False

    def forget(self, level: Level, entries: Rows) -> None:
        """Make misses of entries whose samples have changed."""
        self._recording.finish()
        level.forget(entries)

    def plan(self, ids: Sequence[Any]) -> Plan:
        """Plan the next batch."""
        number, self._next = self._next, self._next + 1
        self._largest = max(self._largest, len(ids))
        plan = Plan(number, tuple(ids), front=self._fronts)
        self._planned[number] = []
        if self.front is not None and self.front.renewals != self._renewals:
            self._begin_anew(self.front)
        numbers = self._numbers_of(plan.ids) if self.front is not None else None
        if self.front is None or numbers is None:
            return plan
        view = self._epoch % self._views if self._views else 0
        entries = np.array(numbers, np.int64) * max(1, self._views) + view
        seeds = tuple(seed_of(self._seed, one, view) for one in numbers) if self._views else None
        plan = dataclasses.replace(plan, entries=tuple(entries.tolist()), seeds=seeds)
        newest = self.level_at(self.front.depth)
        if self._observes(number - self._received):
            return plan
        if newest is None:
            if self._trial_planned or len(plan.ids) < self._largest:
                return plan if not self.levels else self._plan_reads(plan, entries)
            self._trial_planned = True
            return dataclasses.replace(plan, mode=Mode.TRIAL)
        return self._plan_reads(plan, entries)

    def _numbers_of(self, ids: Sequence[Any]) -> list[int] | None:
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
            self.stop(f"the sampler yields {type(ids[0]).__name__} objects, which cannot be hashed")
            return None
        if self._seen_indices or max(numbers, default=0) >= count:
            self.stop(f"the sampler yields more different ids than the {count} samples of the dataset")
            return None
        return numbers

    def _plan_reads(self, plan: Plan, entries: Rows) -> Plan:
        size = len(plan.ids)
        proven = self._sizes.get(size)
        if proven is False or self.front is None:
            return plan
        plan = dataclasses.replace(plan, mode=Mode.FOLLOWED, inputs=self._inputs, structure=self._structure)
        checks = self._is_check()
        stored, pin = np.full(size, -1), self.front.device.type == "cuda"
        reads = self._planned[plan.number]
        levels = list(reversed(self.levels))
        for number, level in enumerate(levels):
            places = np.flatnonzero((stored < 0) & level.present(entries))
            if proven is None and len(places) < size:
                break  # rows of this size are compared, all of them
            if len(places):
                stored[places] = number
                future = self._reader.submit(plan.number, partial(level.read, entries[places], pin))
                reads.append(Read(level, places, future))
        if not self._leaves_out or not self._inputs or proven is None or checks:
            return dataclasses.replace(plan, checks=checks and bool(reads))
        stamps = np.zeros(size, np.uint64)
        for number, level in enumerate(levels):
            stored[(stored == number) & ~level.verified[entries]] = -1
            stamps = np.where(stored == number, level.stamps[entries, 0], stamps)
        folders = tuple(level.store.folder for level in levels)
        return dataclasses.replace(plan, stores=folders, stored=tuple(stored.tolist()), stamps=tuple(stamps.tolist()))

    def _is_check(self) -> bool:
        self._since_check += 1
        if self._since_check in (FIRST_CHECK, CHECK_EVERY_N_BATCHES):
            self._since_check %= CHECK_EVERY_N_BATCHES
            return True
        return False

    # --- batches ------------------------------------------------------------------------------------------------------

    def receive(self, loaded: Loaded, waited: float) -> tuple[Any, CachedBatch | None]:
        """Return the user's batch, and the batch under the cache; None for one without."""
        plan = loaded.plan
        self._received = plan.number
        self._reader.used(plan.number)
        reads = self._planned.pop(plan.number, [])
        if loaded.drew is not None and self._leaves_out and not self._views:
            self._leaves_out = False
            self._notices.inform(
                f"loading a sample changes {loaded.drew}, so every sample is loaded in each epoch. Only the frozen "
                "layers are skipped, for samples that come back unchanged. See augmentation_views"
            )
        if self.front is None or plan.mode is Mode.PLAIN or plan.front != self._fronts:
            if self.front is not None:
                self.stats.misses += len(plan.ids)
                self._trial_planned = self._trial_planned and plan.mode is not Mode.TRIAL
            if plan.mode is Mode.PLAIN:
                return loaded.batch, None
        front = self.front if plan.front == self._fronts else None
        batch = CachedBatch(self, front, loaded, reads, waited)
        given, batch.batch = batch.batch, None  # what the program does not hold must not seem to be held
        return given, batch

    def load(self, batch: CachedBatch, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load tensors of samples."""
        if self._load_elsewhere is not None:
            return self._load_elsewhere(batch.plan, places)
        return self._dataset.tensors(batch.plan, places)

    def computed(self, batch: CachedBatch, node: Node, value: Tensor) -> None:
        """The output at the deepest boundary was computed: try, compare or record it."""
        front = self.front
        if front is None:
            return
        if batch.eager:
            self._finish_trial(batch, node, value, front)
            return
        level = self.level_at(front.depth)
        if level is None or node.key != level.key or value.shape[:1] != (batch.samples,):
            return
        if not self.front_is_unchanged():
            self._front_moved(front)
            return
        self._moved = 0
        if (batch.samples not in self._sizes or batch.plan.checks) and not self._compare(batch, level, value):
            return
        made = batch.stamps(node)
        if made is not None and self._is_read_again and self._sizes.get(batch.samples):
            self._recording.write(self.levels, batch.entries, value, batch.fields, batch.lazy, made)

    def finish(self, batch: CachedBatch) -> None:
        """The batch is over."""
        front = self.front
        if front is None or batch.front is not front:
            return
        if batch.eager and not batch.calls:
            self._no_trial("the frozen layers were not called with tensors of the batch")
            return
        self._accounts.count(batch)
        if self.level_at(front.depth) is None:
            return
        served = batch.hits + batch.advanced > 0
        had_rows = any(read.future.done() and not read.future.cancelled() for read in batch.reads)
        self._strange = 0 if served or batch.plan.checks else self._strange + had_rows
        self._other = 0 if batch.matches else self._other + had_rows
        if self._other >= OTHER:
            self.stop(f"the last {OTHER} batches called the frozen layers in another way than before, or not at all")
            return
        if self._strange >= STRANGE:
            self.stop(f"the inputs of the last {STRANGE} batches differed from those of the entries (random or mixed?)")
            return
        self._count_lazy(batch, front)
        judgement = self._accounts.judgement()
        if judgement is not None and not judgement[0]:
            self.stop(f"it does not pay: {judgement[1]}")
        elif judgement is not None:
            self._notices.inform(f"the cache of {self._name} pays: {judgement[1]}")

    def touched_late(self, batch: CachedBatch) -> None:
        """The program reads inputs after the end of their batch."""
        lazy = sum(batch.lazy)
        self.stats.not_loaded -= lazy
        self.stats.loaded_after_all += lazy

    def close(self, remove: bool = False) -> None:
        """Stop reading and writing; ``remove`` the stores too, or leave them on disk. Safe to call twice."""
        self.front = None
        self._reader.close()
        self._recording.close()
        self.measure_disk()
        self._dataset.close()
        for level in self.levels:
            level.store.close()
            if remove:
                self._dropped.append(level.store.folder)
        self.levels = []
        self._remove_dropped()

    def measure_disk(self) -> None:
        """Update ``stats.bytes_on_disk``."""
        if self.levels:
            self.stats.bytes_on_disk = bytes_on_disk(self.levels)

    def progress_text(self) -> str | None:
        """How much of the deepest level is there, in words; None while nothing is cached, and when all of it is."""
        if not self.levels or self.front is None or not self._recording.active:
            return None
        now = time.monotonic()
        if now - self._counted_at > COUNT_EVERY_S:  # a bar asks at each step, and there may be millions of entries
            index = self.levels[-1].store.index
            self._counted_at, self._recorded = now, np.count_nonzero(index) / max(1, len(index))
        return f"{self._recorded:.0%}" if self._recorded < 1 else None

    # --- decisions ----------------------------------------------------------------------------------------------------

    @property
    def _is_read_again(self) -> bool:
        """Whether entries written now may be read before the run ends."""
        return self._epochs is None or self._epoch + max(1, self._views) < self._epochs

    def _count_lazy(self, batch: CachedBatch, front: Front) -> None:
        ran, front.ran = front.ran, set()
        if not any(batch.lazy):
            return
        self._lazy_batches += 1
        self._touches += batch.was_touched is not None
        if batch.hits == batch.samples and ran:
            self._reruns = [self._reruns[0] + 1, min(self._reruns[1], *ran)]
        if self._lazy_batches < COUNTED:
            return
        reruns, first = self._reruns
        if 2 * reruns > COUNTED:
            self.stop(f"something reads the output of {front.units[first].path!r} in most batches")
        elif 2 * self._touches > COUNTED:
            self._leaves_out = False
            self._notices.inform(f"{batch.was_touched} reads the input in most batches, so samples are loaded again")
        self._lazy_batches = self._touches = 0
        self._reruns = [0, 10**9]

    def _compare(self, batch: CachedBatch, level: Level, value: Tensor) -> bool:
        """Compare entries with what the front computed; return whether they agree."""
        stored = batch.rows(level)
        if stored is None:
            return batch.samples in self._sizes
        stored = stored.to(value.device)
        if batch.samples not in self._sizes:
            self._agreed[batch.samples] = self._agreed.get(batch.samples, 0) + 1
            if same_bits(stored, value) and self._agreed[batch.samples] < AGREEING:
                return False
            self._sizes[batch.samples] = same_bits(stored, value)
            if not self._sizes[batch.samples]:
                self._notices.inform(
                    f"rows in batches of {batch.samples} differ in their last bits, so these batches are not cached"
                )
            return self._sizes[batch.samples]
        if same_bits(stored, value) or (not self._exact and is_rounding(stored, value)):
            return True
        self.stats.wrong += batch.samples
        level.forget(batch.entries)
        self._changes += 1
        if self._changes >= CHANGES_TO_STOP:
            self.stop("entries differ from what the frozen layers compute")
        return False

    def _front_moved(self, front: Front) -> None:
        """The weights of the front are not those of the entries: begin anew with these, if they stay."""
        self._moved += 1
        if self._moved < MOVED:
            return
        if front.renewals >= CHANGES_TO_STOP:
            self.stop("the frozen layers keep changing")
            return
        text = "the frozen layers have changed, so their outputs are cached anew"
        if self._name == "training":
            self._notices.warn(text, once="changed")
        front.renew()
        self._begin_anew(front)

    def _begin_anew(self, front: Front) -> None:
        self._drop(self.levels)
        self._forget_front()
        self._renewals = front.renewals
        self._accounts.restart()
        self.stats.depth = 0

    def _no_trial(self, reason: str) -> None:
        self._trials += 1
        self._trial_planned = False
        if self._trials >= TRIALS:
            self.stop(reason)

    def _finish_trial(self, batch: CachedBatch, node: Node, value: Tensor, front: Front) -> None:
        if self.level_at(front.depth) is not None:
            return
        made, structure = batch.stamps(node), batch.loaded.structure
        if made is None or len(batch.fields) != batch.samples:
            self._no_trial("samples differ in their structure")
            return
        if not front.state.is_unchanged() and not front.state.is_same():
            self._no_trial("the frozen layers change their own buffers or attributes")
            return
        with front.state.preserved():
            problem, self._exact = try_boundary(node, value)
            smaller = smaller_sizes(node, value) if problem is None and self._exact else []
        if problem is not None:
            self.stop(f"at {front.units[-1].path!r}, {problem}")
            return
        self._inputs = tuple(sorted({leaf.row[1] for leaf in node.leaves() if leaf.row is not None}))
        self._structure = structure
        self._open(batch, node, value, front)
        level = self.level_at(front.depth)
        if level is None:
            return
        self._sizes, self._smaller = {batch.samples: True}, smaller
        if self._is_read_again:
            fields = [without_inputs(one, self._inputs) if one is not None else None for one in batch.fields]
            self._recording.write(self.levels, batch.entries, value, fields, batch.lazy, made)
        if not self._exact:
            self._notices.inform(
                "the last bits of a sample's output depend on its place in the batch; they may differ from a run "
                "without the cache"
            )

    def _open(self, batch: CachedBatch, node: Node, value: Tensor, front: Front) -> None:
        form = RowForm.of(value)
        entries = len(self._dataset) * max(1, self._views)
        longest = max((len(one) for one in batch.fields if one is not None), default=0)
        field_bytes = max(64, FIELD_SLACK * longest)
        manifest = Manifest(
            self._fingerprint(node, form, front),
            entries,
            form.piece_bytes,
            field_bytes,
            str(form.dtype),
            form.order,
            {
                "model": type(front.prefix.module).__name__,
                "boundary": front.units[-1].path,
                "data": type(self._dataset.dataset).__name__,
                "samples": str(len(self._dataset)),
                "loader": self._name,
                "augmentation_views": str(self._views),
                "row": f"{'x'.join(map(str, form.piece))} {form.dtype}",
            },
        )
        size = entries * (form.piece_bytes + field_bytes + manifest.header_bytes)
        try:
            store, room = self._directory.open(manifest, size, self._limits.max_bytes, self._limits.min_free_bytes)
        except (StoreError, CacheError) as error:
            self.stop(str(error), once="the disk")
            return
        host = MemoryTier(self._limits.host_bytes, form, entries, torch.device("cpu"))
        device_bytes = self._limits.device_bytes if front.device.type != "cpu" else 0
        device = MemoryTier(device_bytes, form, entries, front.device)
        stamps, verified = np.zeros((entries, 2), np.uint64), np.zeros(entries, bool)
        for older in self.levels:
            older.release_memory()
        self.levels.append(Level(front.depth, node.key, form, store, host, device, stamps, verified))
        self._recording.restart(self._taken_by_others())
        self.stats.depth = front.depth
        share = "" if size <= room else f", of which {room / size:.0%} fit"
        self._notices.inform(
            f"the outputs of {front.units[-1].path!r} will take about {size / 1e9:.2f} GB in {store.folder} "
            f"({entries} entries of {form.piece_bytes} bytes){share}"
        )

    def _fingerprint(self, node: Node, form: RowForm, front: Front) -> str:
        """Name everything that the entries depend on, in hexadecimal digits."""
        device = front.device
        cuda = device.type == "cuda"
        parts = [
            str(FORMAT),
            torch.__version__,
            torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
            torch.get_float32_matmul_precision(),
            str(form),
            str(self._views),
            str(self._seed if self._views else 0),
            str(node.tape.size),  # rows of other sizes may differ in their last bits
            f"{type(self._dataset.dataset).__qualname__} {len(self._dataset)} {self._structure!r}",
            uuid.uuid4().hex if self._numbers is not None else "",  # numbers of this run only
            self.keys.describe(node.key),
        ]
        state = hashlib.blake2b(digest_size=16)
        for part in parts:
            state.update(part.encode() + b"\0")
        state.update(front.state.digest)
        return state.hexdigest()

    def _taken_by_others(self) -> int:
        own = {level.store.folder for level in self.levels}
        with contextlib.suppress(CacheError):  # nobody may read the folder any longer
            return sum(one.bytes_on_disk for one in self._directory.summaries() if one.folder not in own)
        return 0

    def _drop(self, levels: Sequence[Level]) -> None:
        if levels:
            self._reader.cancel()
            self._recording.finish()
        self._dataset.close()  # an open store is not removed
        for level in list(levels):
            self.levels.remove(level)
            level.store.close()
            self._dropped.append(level.store.folder)
        self._remove_dropped()

    def _remove_dropped(self) -> None:
        """Remove stores that are of no use; those that a worker process still has open later."""
        self._dropped = [folder for folder in self._dropped if not self._directory.remove(folder) and folder.exists()]


def seed_of(seed: int, sample_id: int, view: int) -> int:
    """Return the seed of one view of a sample's randomness: a hash, so that neighbours have nothing in common.

    >>> seed_of(0, 1, 0) != seed_of(0, 0, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {sample_id} {view}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
