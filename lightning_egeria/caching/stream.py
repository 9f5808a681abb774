"""The batches of one loader, from their plans to their ends: what is cached of them, and where."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_egeria.caching import policy
from lightning_egeria.caching.entries import BatchSizes, CachedValue, CachedValues, Origin
from lightning_egeria.caching.frozen import FrozenModules
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.plan import Loaded, Mode, Plan
from lightning_egeria.caching.planner import Planner
from lightning_egeria.caching.probe import MIXED, mixes_samples, try_rows, why_not_a_row
from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.outside import Outside, has_samples
from lightning_egeria.caching.record.tape import UNKNOWN, Node
from lightning_egeria.caching.record.units import UnitCall
from lightning_egeria.caching.serve import CachedBatch, paths_behind, sizes_behind
from lightning_egeria.caching.stats import NOTHING_FROZEN, Accounts, CacheStats, Habits, spending
from lightning_egeria.caching.store.directory import CacheDirectory
from lightning_egeria.caching.store.limits import Limits
from lightning_egeria.caching.store.rows import Rows
from lightning_egeria.caching.store.samples import Opaque, decode, without_inputs
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import CacheError, StoreError

FIELD_SLACK = 2  # encoded fields may be this many times as long as the longest of the first batch


class Stream:
    """Plans the batches of one loader, and serves, computes and records what the program asks of frozen modules.

    Args:
        name: ``"training"`` or the name of a validation loader, for messages and stores.
        dataset: the user's dataset, asked for planned batches.
        directory: folder of the stores.
        limits: limits of room.
        views: variants of each sample to cache; 0 loads samples as they come.
        seed: seed of the views.
        observes: whether the batch that many ahead needs its real input.
        load: loads tensors of samples of a batch.
        notices: takes messages.
        stats: counts what is done; None makes one.
        stays: whether later runs may read the entries.

    Attributes:
        stats: what was done so far.
        accounts: tell whether the cache pays.
        frozen: the frozen modules; None if nothing is cached.
        values: the cached values.
        keys: numbers of the computations seen so far.
        outside: tensors of the program.
        epoch: number of the epoch.
        shuffled: whether each epoch has other batches.
        without_outside: paths of frozen modules whose inputs the program makes, other ones each time.
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
        stays: bool = False,
    ) -> None:
        self.stats = stats if stats is not None else CacheStats()
        self.frozen: FrozenModules | None = None
        self.keys, self.outside = Keys(), Outside()
        self.values = CachedValues(directory, limits, self.stats, notices, dataset.close)
        self.without_outside: set[str] = set()
        self.epoch, self.shuffled = 0, False
        self._name, self._dataset, self._views, self._seed, self._load = name, dataset, views, seed, load
        self._notices, self._stays = notices, stays
        self._planner = Planner(dataset, self.values, views, seed, observes, notices)
        self.accounts = Accounts(self.stats)
        self._versions = self._differences = 0
        self._epochs: int | None = None
        self._batches: int | None = None
        self._only_here = self._is_compared = False
        self._forget()

    def _forget(self) -> None:
        self._habits = Habits()
        self._without_result = 0
        self._asked: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._first: int | None = None  # batch after a change of what is frozen
        self._refused: set[tuple[int, tuple[int, ...]]] = set()  # keys and shapes of rows
        self._was_exact = True

    def start(self, frozen: FrozenModules | None, keep: bool) -> None:
        """Other modules are frozen; None: none. ``keep`` what was cached if those of before still are."""
        self.values.reader.cancel()
        if not keep:
            self.values.drop()
            self._differences = 0
        self.frozen = frozen
        self._versions += 1
        self._forget()
        self._planner.begin_frozen(frozen)
        self.accounts.restart()
        self.stats.off = None if frozen is not None else NOTHING_FROZEN

    def stop(self, reason: str, once: str | None = None) -> None:
        """Cache nothing more until other modules are frozen; warn, for one problem of all streams only ``once``."""
        self.values.drop()
        self.frozen = None
        self.stats.off = reason
        self._notices.warn(f"the cache of {self._name} is off: {reason}", once=once or reason)

    def frozen_is_same(self) -> bool:
        """Whether weights, buffers and modes are those that entries were computed by; else drop these entries.

        All bits are compared once in each epoch: when its first batch needs them, because Lightning puts the model into
        evaluation mode after validation has begun to iterate.
        """
        if self.frozen is None:
            return False
        all_bits, self._is_compared = not self._is_compared, True
        with self.spending() if all_bits else contextlib.nullcontext():
            changed = self.frozen.changed(all_bits)
        if changed:
            self._have_changed(self.frozen, changed)
        return not changed

    @property
    def writes(self) -> bool:
        """Whether what is computed now becomes an entry: there is room, and it may be read before the run ends."""
        return self._is_read_again and self.values.recording.active

    @property
    def _is_read_again(self) -> bool:
        return self._epochs is None or self.epoch + max(1, self._views) < self._epochs

    def begin_epoch(
        self, epoch: int, epochs: int | None, has_workers: bool, batches: int | None = None, shuffled: bool = False
    ) -> None:
        """The loader begins; batches that were planned and did not come will not.

        Args:
            epoch: number of the epoch.
            epochs: number of all epochs, if each of them has every sample once at most; None if that is not known.
            has_workers: whether other processes load.
            batches: of an epoch; None if that is not known.
            shuffled: whether each epoch has other batches.
        """
        self.epoch, self._epochs, self.accounts.loads_ahead, self.shuffled = epoch, epochs, has_workers, shuffled
        self._batches = None if epochs is None or batches is None else (epochs - epoch) * batches
        self._is_compared = False
        self.accounts.race.new_pass()
        with self.spending():
            self._planner.begin_epoch(epoch, self.frozen is not None, has_workers)
            self.values.begin_epoch(epoch)

    def spending(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for what training would not do without the cache."""
        return spending(self.stats)

    def plan(self, ids: Sequence[Any]) -> Plan:
        """Plan the next batch."""
        frozen = self.frozen
        if frozen is not None and self._has_outgrown:
            self._begin_again(frozen)
        frozen = frozen if self._is_read_again or len(self.values) else None
        try:
            return self._planner.plan(ids, frozen is not None, self._versions, self.accounts.race.takes)
        except CacheError as error:
            self.stop(str(error))
            return self._planner.plan(ids, False, self._versions, self.accounts.race.takes)

    @property
    def reads_ahead(self) -> bool:
        """Whether entries are read ahead: there are some, or there may be."""
        return self.frozen is not None and len(self.values) > 0

    @property
    def _has_outgrown(self) -> bool:
        """Whether the dataset has more samples now than there is room for in a store."""
        return any(len(value.stamps) < len(self._dataset) * max(1, self._views) for value in self.values)

    def plan_again(self, ids: Sequence[Any], reads: bool) -> Plan | None:
        """Plan a batch of samples that are there already, with or without reads of entries; None: it is not cached."""
        if self.frozen is None or not len(self.values):
            return None
        return self._planner.plan_again(ids, self._versions, reads)

    def is_proven(self, size: int) -> bool:
        """Whether rows in batches of a size have the bits of the entries."""
        return all(value.sizes.verdict(size) for value in self.values)

    def keep_samples(self) -> None:
        """Have batches come with their samples, from the next plan on."""
        self._planner.keeps_samples = True

    def last_look(self, plan: Plan) -> Plan:
        """Refresh a plan that was made ahead: load samples that have become doubtful since."""
        return self._planner.last_look(plan) if self.frozen is not None else plan

    def forget_verified(self, ids: Rows | None = None) -> None:
        """Compare entries with their samples before they are used again; all entries by default."""
        self.values.forget_verified(ids, self._views)

    def forget(self, value: CachedValue, entries: Rows, doubt: bool) -> None:
        """Make misses of entries whose samples have changed; ``doubt`` all others if that could not be seen."""
        self.values.forget(value, entries)
        if doubt:
            self._planner.doubt_samples()

    def receive(self, loaded: Loaded, waited: float) -> tuple[Any, CachedBatch | None]:
        """Return the user's batch, and the batch under the cache; None for one without."""
        started, plan = time.perf_counter(), loaded.plan
        reads = self._planner.received(loaded)
        if loaded.together and self.frozen is not None:
            self.stop("the dataset's __getitems__ makes batches, whose samples are not those of its __getitem__")
        if loaded.varies and self.frozen is not None:
            self.stop(
                "samples change at random each time they are loaded. Pass augmentation_views to cache some variants of "
                "each, or augment behind the frozen layers"
            )
        if self.frozen is not None and (plan.mode is Mode.PLAIN or plan.version != self._versions):
            self.stats.misses += len(plan.ids)
        if plan.mode is Mode.PLAIN:
            return loaded.batch, None
        frozen = self.frozen if plan.version == self._versions else None
        batch = CachedBatch(self, frozen, loaded, reads, waited)
        if plan.mode is Mode.PROBE and not batch.eager:  # another one has shown what is kept
            fields = (one if one is None else without_inputs(one, self._planner.inputs) for one in batch.fields)
            batch.fields = tuple(fields)
        batch.around = time.perf_counter() - started
        given, batch.batch = batch.batch, None  # what the program does not hold must not seem to be held
        return given, batch

    def load(self, batch: CachedBatch, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load tensors of samples."""
        with batch.apart():
            return self._load(batch.loaded, places)

    # --- what the program asks for -----------------------------------------------------------------------------------

    def probe(self, batch: CachedBatch, node: Node, value: Tensor) -> Tensor:
        """The program asks for a value in a probe: keep it from now on, if that is possible and pays."""
        batch.demands += 1
        try:
            self._probe(batch, node, value)
        except (CacheError, StoreError) as error:
            self.stop(str(error), once="the disk" if isinstance(error, StoreError) else None)
        kept = self.values.of(node.key, value.shape[1:]) if node.name != UNKNOWN and value.ndim else None
        return kept.form.rounded(value) if kept is not None else value

    def not_cached(self, batch: CachedBatch, node: Node, value: Tensor) -> None:
        """The program asks for a value that is not cached: one that it asks for again may be kept."""
        if node.name == UNKNOWN or _name(node) in self._refused or not self.writes:
            return
        alike = self.values.of_modules(paths_behind(node))
        batch.sizes = sizes_behind(node) if alike else batch.sizes
        is_of_other_size = bool(alike) and batch.sizes not in [one.sizes_behind for one in alike]
        self._asked[_name(node)] += 1
        self._first = batch.plan.number if self._first is None else self._first
        is_first = self._first == batch.plan.number or (is_of_other_size and not self.shuffled)
        if is_first or self._asked[_name(node)] >= policy.ASKED_TO_KEEP:
            self.probe(batch, node, value)

    def _probe(self, batch: CachedBatch, node: Node, value: Tensor) -> None:
        frozen = self.frozen
        if frozen is None or node.name == UNKNOWN or self._is_kept(node) or _name(node) in self._refused:
            return
        self._refused.add(_name(node))
        if len(batch.fields) != batch.samples or batch.samples < self._planner.largest:
            self._refused.discard(_name(node))
            return
        problem = why_not_a_row(node, value)
        outputs, is_mixed = _outputs_behind(node)
        if problem is not None or is_mixed:
            # A number made of all samples, say, or a sum with random noise: it follows from these.
            behind = [one for one in outputs if one.value is not None]
            kept = [self._probed(batch, one) for one in behind]
            if problem is not None and not any(kept) and not any(map(self._is_kept, outputs)):
                self._problem(batch, node, value, problem)
            return
        costs = self._costs(batch, node, value)
        if not self._pays(batch, costs):
            return
        paths = paths_behind(node)
        frozen.watch(paths)
        with batch.apart():
            is_mixed = mixes_samples(node)
        if is_mixed:
            problem, exact, sizes = MIXED, True, BatchSizes(batch.samples)
        elif self.values.has(node.key):  # for samples of another size
            problem, exact, sizes = None, True, BatchSizes(batch.samples)
        elif policy.may_probe(costs.all_seconds, self._batches, self.shuffled):
            with batch.apart(), frozen.preserved():
                problem, exact = try_rows(node, value, [] if batch.eager else self._starts(node))
            sizes = BatchSizes(batch.samples)
            if problem is None and not self._pays(batch, self._costs(batch, node, value)):
                return  # the first run of a module takes longer than others
        else:
            problem, exact, sizes = None, True, BatchSizes(batch.samples, proven=False)
        if problem is None and self.outside.stamps(node) is None:
            problem = "tensors that the step makes change in place, or are others in each batch"
        if problem is not None:
            # What the program does with the outputs of frozen modules may mix the samples; these do not.
            if any(self._probed(batch, one) for one in outputs if one is not node):
                return
            self._problem(batch, node, value, problem)
            return
        is_first = not self.values.of_modules(paths)
        text = self._open(batch, node, value, paths, sizes)
        if is_first:
            self._notices.inform(text)
        self._tell_what_is_not_kept(batch)
        batch.matches += 1
        if batch.eager:  # which inputs are left out of the fields is known at its end
            batch.waiting.append((self.values.all[-1], node, value.detach().clone()))
        else:
            self.record(batch, self.values.all[-1], node, value, np.arange(batch.samples))
        if not exact and self._was_exact:
            self._was_exact = False
            text = "the last bits of a sample's output depend on its place in the batch"
            self._notices.inform(f"{text}; they may differ from a run without the cache")

    def _probed(self, batch: CachedBatch, node: Node) -> bool:
        """Probe an output of a frozen module that has a value; return whether it is kept."""
        if node.value is None:
            return False
        self._probe(batch, node, node.value)
        return self._is_kept(node)

    def _problem(self, batch: CachedBatch, node: Node, value: Tensor, problem: str) -> None:
        """A value cannot be kept; without another one, the cache stops."""
        batch.problem = f"at {sorted(paths_behind(node))[-1]!r}, {problem}" if node.frozen else problem
        outside = any(leaf.row is None and has_samples(leaf) for leaf in node.leaves())
        # A tensor of the program with that length, position embeddings say, passes for rows of the batch.
        batch.may_be_chance = outside and batch.samples in value.shape[1:]

    def _pays(self, batch: CachedBatch, costs: policy.Costs) -> bool:
        """Whether a value should be kept; if not, the statistics tell why."""
        reason = policy.why_not_keep(costs, len(self.values))
        if reason is not None:
            self.stats.not_kept = reason
            batch.matches += 1
        return reason is None

    def _costs(self, batch: CachedBatch, node: Node, value: Tensor) -> policy.Costs:
        kept = {one for one in node.before(lambda _: False) if one is not node and self._is_kept(one)}
        behind = node.before(lambda one: one in kept)
        everything = node.before(lambda _: False)
        return policy.Costs(
            rows=node.tape.size,
            row_bytes=value[:1].numel() * value.element_size(),
            seconds=_seconds(behind),
            all_seconds=_seconds(everything),
            from_kept=bool(kept) and not any(one.row is not None for one in behind),
            sample_bytes=max((len(one) for one in batch.fields if one is not None), default=0),
            reads=None
            if self._epochs is None or self._stays
            else (self._epochs - self.epoch - 1) // max(1, self._views),
            batches=self._batches // (self._epochs - self.epoch) if self._batches and self._epochs else 1,
        )

    def _starts(self, node: Node) -> list[Node]:
        """Return the nearest cached values behind a node, which the batch has."""
        order = node.before(lambda one: one is not node and self._is_kept(one) and one.value is not None)
        reached = {argument for one in order for argument in one.arguments()} - {*order}
        return [one for one in reached if one.value is not None and self._is_kept(one)]

    def _is_kept(self, node: Node) -> bool:
        return node.frozen and node.name != UNKNOWN and self.values.of(node.key, node.meta.shape[1:]) is not None

    def _open(self, batch: CachedBatch, node: Node, value: Tensor, paths: frozenset[str], sizes: BatchSizes) -> str:
        planner = self._planner
        inputs = {leaf.row[1] for leaf in node.leaves() if leaf.row is not None}
        if not len(self.values):
            planner.inputs, planner.structure = tuple(sorted(inputs)), batch.loaded.structure
        elif batch.eager:  # of the same batch: nothing was written yet
            planner.inputs = tuple(sorted(inputs | set(planner.inputs)))
        if batch.eager:
            batch.whole_fields = batch.whole_fields or batch.fields
            batch.fields = tuple(
                without_inputs(one, planner.inputs) if one is not None else None for one in batch.whole_fields
            )
        longest = max((len(one) for one in batch.fields if one is not None), default=0)
        frozen = self.frozen
        assert frozen is not None  # a value of it is kept
        only_here = self._only_here or planner.has_own_ids
        origin = Origin(
            loader=self._name,
            data=type(self._dataset.dataset),
            samples=len(self._dataset),
            structure=planner.structure,
            views=self._views,
            seed=self._seed,
            run=uuid.uuid4().hex if only_here else "",
            computation=node.tape.keys.describe(node.key),
            batch_size=node.tape.size,
            model=type(frozen.model),
            paths=tuple(path for path in frozen.modules if path in paths),
            weights=frozen.digest_of(paths),
            device=frozen.device,
        )
        # Samples that were left out have their fields in the stores of other values.
        room = max([64, FIELD_SLACK * longest, *(one.store.manifest.field_bytes for one in self.values)])
        return self.values.open(origin, value, room, node.key, sizes, sizes_behind(node))

    def _tell_what_is_not_kept(self, batch: CachedBatch) -> None:
        """Say which type of field makes the cache load every sample again."""
        fields = next((one for one in batch.fields if one is not None), None)
        kinds = {leaf.type_name for leaf in decode(fields) if isinstance(leaf, Opaque)} if fields is not None else set()
        if kinds:
            self._notices.inform(
                f"all samples are loaded in each epoch: fields of type {', '.join(sorted(kinds))} cannot be stored. "
                "Have the dataset return plain tensors, in dicts, lists or tuples (with torchvision.transforms.v2, add "
                "ToPureTensor() as the last transform)",
                once=f"fields of {self._name}",
            )

    def _shows_nothing(self, reason: str) -> None:
        """A probe showed nothing; another batch is tried.

        Raises:
            CacheError: too many of them showed nothing.
        """
        self._without_result += 1
        if self._without_result >= policy.PROBES:
            raise CacheError(reason)

    def compared(self, batch: CachedBatch, value: CachedValue, same: bool) -> None:
        """Entries were compared with what the frozen modules computed in a batch of a size without verdict."""
        if value.sizes.compared(batch.samples, same) is False:
            self._notices.inform(
                f"rows in batches of {batch.samples} differ in their last bits, so these batches are not cached"
            )

    def differs(self, samples: int) -> None:
        """The frozen modules compute something else than the entries of some samples say: no entry is trusted."""
        self.stats.wrong += samples
        self._differences += 1
        text = "entries differ from what the frozen layers compute"
        if self._differences >= policy.DIFFERENCES_TO_STOP or self.frozen is None:
            self.stop(f"{text}: samples or layers change where the cache cannot see it")
            return
        self._notices.warn(f"{text}, so all are dropped, and computed again", once=f"{text} of {self._name}")
        self._only_here = True  # or the same store would be opened again
        self._begin_again(self.frozen)

    def record(self, batch: CachedBatch, value: CachedValue, node: Node, rows: Tensor, places: Rows) -> None:
        """Write some rows of a value, if they may be read again."""
        if not self.writes or batch.plan.doubts != self.values.doubts or value not in self.values.all:
            return
        if not value.sizes.makes_entries(batch.samples):
            return
        made = self.outside.stamps(node)
        if made is None or self.frozen is None or not batch.frozen_is_same():
            return
        started = time.perf_counter()
        fields, lazy = [batch.fields[place] for place in places], [batch.lazy[place] for place in places]
        self.values.recording.write(self.values.all, value, batch.entries[places], rows, fields, lazy, made[places])
        batch.recording += time.perf_counter() - started

    # --- the end of a batch ------------------------------------------------------------------------------------------

    def finish(self, batch: CachedBatch) -> None:
        """The batch is over."""
        frozen = self.frozen
        if frozen is None or batch.frozen is not frozen:
            return
        frozen.ran = set()
        frozen.leave_out_unused()
        if batch.eager and frozen.opened and self._without_result < policy.PROBES:
            frozen.opened = False  # the modules inside are tried in the next batch
            self._without_result += 1
            self._refused.clear()
            self.values.drop()
            return
        if batch.eager and not len(self.values):
            self._finish_probe(batch, frozen)
            return
        if frozen.has_fresh and (changed := frozen.changed(all_bits=True)):  # some set an attribute in their first step
            self._have_changed(frozen, changed, tells=False)
            batch.waiting = [one for one in batch.waiting if one[0] in self.values.all]
        frozen.count_batch()
        for value, node, rows in batch.waiting:
            self.record(batch, value, node, rows, np.arange(batch.samples))
        self.accounts.count(batch)
        if not len(self.values):
            return
        self._drop_unmatched(frozen)
        if self.frozen is None:
            return
        is_random = self.shuffled and batch.samples > 1
        if (reason := self._habits.why_stop(batch, is_random, self.values.come_in_sizes)) is not None:
            self.stop(reason)
            return
        if (reader := self._habits.reader) is not None and self._planner.leaves_out:
            self._planner.load_all(f"{reader} reads the input in most batches, so samples are loaded again")
            self.accounts.race_again()  # so far they were loaded late
        judgement = self.accounts.judgement(frozen.device, self._batches)
        if judgement is not None and not judgement[0]:
            self.stop(f"it does not pay: {judgement[1]}")
        elif judgement is not None:
            self._notices.inform(f"the cache of {self._name} pays: {judgement[1]}")

    def _finish_probe(self, batch: CachedBatch, frozen: FrozenModules) -> None:
        """A probe has kept nothing: say why, or try another batch."""
        try:
            if self.stats.not_kept:  # what mixes the samples behind it is not the reason
                raise CacheError(self.stats.not_kept)
            if batch.problem is not None and not batch.may_be_chance:
                raise CacheError(batch.problem)
            if batch.problem is not None:
                hint = "(or another dimension is as large as the batch: try another batch size)"
                self._shows_nothing(f"{batch.problem} {hint}")
            elif not batch.demands:
                names = ", ".join(map(repr, frozen.outermost[:3]))
                self._shows_nothing(frozen.refused or f"{names} was not called with tensors of the batch")
        except CacheError as error:
            self.stop(str(error))

    def _drop_unmatched(self, frozen: FrozenModules) -> None:
        """Drop values whose entries are never those of the samples, because the program makes their inputs."""
        lost = [value for value in self.values if value.unmatched >= policy.OTHER]
        if lost and len(lost) == len(self.values):
            text = f"all inputs of the last {policy.OTHER} batches differed from those of the entries"
            self.stop(f"{text} (random, mixed, or sorted by the collate function?)")
        elif lost:
            for value in lost:
                self._refused.add((value.key, value.shape))
                self.without_outside |= value.paths
            self.values.drop(lost)

    def touched_late(self, batch: CachedBatch) -> None:
        """The program reads inputs after the end of their batch."""
        self.accounts.touched_late(batch)
        self._habits.touched(batch)

    def close(self, remove: bool = False) -> None:
        """Stop reading and writing; ``remove`` the stores too, or leave them on disk. Safe to call twice."""
        self.frozen = None
        self.values.close(remove)

    def progress_text(self) -> str | None:
        """How much of the newest value is there, in words; None while nothing is cached, and when all of it is."""
        return self.values.progress_text() if self.frozen is not None else None

    def _have_changed(self, frozen: FrozenModules, changed: set[str], tells: bool = True) -> None:
        """Modules are not those of the entries: drop these, and keep others if the modules stay as they are now."""
        lost = [value for value in self.values if value.paths & changed]
        if tells and lost and self._name == "training":
            self._notices.warn("the frozen layers have changed, so their outputs are cached again", once="changed")
        if lost:
            self.values.drop(lost)
        self._refused -= {(value.key, value.shape) for value in lost}
        frozen.unwatch(changed)
        if not len(frozen):
            self.stop("the frozen layers keep changing")

    def _begin_again(self, frozen: FrozenModules) -> None:
        self.values.drop()
        self._forget()
        self._planner.begin_frozen(frozen)
        self.accounts.restart()


def _outputs_behind(node: Node) -> tuple[list[Node], bool]:
    """Return the nearest outputs of frozen modules behind a value, and whether the program's tensors are mixed in.

    Where such a tensor has a row for each sample, such as noise or a mask of dropout, and meets the output of a frozen
    module, the outputs are those in front of that.
    """
    order = node.before(lambda one: not one.frozen)
    mixing = [
        one
        for one in order
        if not one.is_unit
        and any(leaf.call is None and leaf.row is None and has_samples(leaf) for leaf in one.arguments())
    ]
    found: dict[int, Node] = {}
    waiting = [leaf for one in mixing or ([] if node.is_unit else [node]) for leaf in one.arguments()]
    while waiting:
        one = waiting.pop()
        if one.is_unit:
            found[one.number] = one
        elif one.frozen:
            waiting.extend(one.arguments())
    behind_mixing = {one.number for one in mixing}
    outputs = [
        found[number]
        for number in sorted(found)
        if not behind_mixing & {one.number for one in found[number].before(lambda one: not one.frozen)}
    ]
    return outputs, bool(mixing)


def _name(node: Node) -> tuple[int, tuple[int, ...]]:
    """Return the key of a computation and the shape of its rows."""
    return node.key, tuple(node.meta.shape[1:])


def _seconds(nodes: Sequence[Node]) -> float:
    """Return the time of the frozen modules among nodes; each of them once, whatever it returns."""
    calls = {id(node.call): node.call.run for node in nodes if node.call is not None}
    return sum(run.seconds() for run in calls.values() if isinstance(run, UnitCall))
