"""From the batches of a training run to cached ones, without a trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import shutil
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_egeria.caching.background import ReadAhead, WriteBehind
from lightning_egeria.caching.bypass import BoundaryReachedError, Passage, PrefixBypass, rows_of
from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.levels import Level, MemoryTier, RowForm, Rows
from lightning_egeria.caching.loading import Findings, InputField, Loaded, Plan, PlannedDataset, replace_leaf
from lightning_egeria.caching.proof import Proof, Prover, rows_alike
from lightning_egeria.caching.samples import same_leaf, stand_in_tensor
from lightning_egeria.caching.store import Manifest, StoreError
from lightning_egeria.caching.watch import StepWatch
from lightning_egeria.calls import CallRecorder
from lightning_egeria.clock import mark, seconds_between
from lightning_egeria.compilation import eager, is_compiled
from lightning_egeria.errors import CacheError
from lightning_egeria.layers import FrozenPrefix
from lightning_egeria.tracing import tensor_leaves

SPOT_CHECK_EVERY_N_BATCHES = 200
FIRST_SPOT_CHECK = 20
COMPARED_STEPS = 12  # of each kind, before it is decided whether the cache pays
WEIGHT_CHANGES_TO_STOP = 3
FIELD_SLACK = 2  # encoded fields may be so many times as long as the longest that was seen first


@dataclasses.dataclass
class CacheStats:
    """What the cache has done.

    Attributes:
        hits: samples whose frozen layers were left out.
        advanced: samples that came from a shallower boundary and ran only the layers that froze since.
        misses: samples that ran all of the frozen layers since the cache is on.
        not_loaded: samples that were not even loaded.
        written: entries written.
        wrong: entries that were found to be damaged or outdated.
        bytes_on_disk: of the stores of this run.
        seconds_saved: estimate: hits times what a sample's miss took longer than its hit; negative where it lost.
        cut: depth of the boundary that is cached; 0: none.
        off: why the cache is off; None while it is on.
    """

    hits: int = 0
    advanced: int = 0
    misses: int = 0
    not_loaded: int = 0
    written: int = 0
    wrong: int = 0
    bytes_on_disk: int = 0
    seconds_saved: float = 0.0
    cut: int = 0
    off: str | None = "nothing is frozen"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much room the cache may take. Bytes, and None for no limit but that of the disk."""

    max_bytes: int | None
    min_free_bytes: int
    host_bytes: int
    device_bytes: int


@dataclasses.dataclass
class _Read:
    """Rows of one level for some places of a batch."""

    level: Level
    places: Rows
    entries: Rows
    future: Future[tuple[Tensor, Any]] | None  # None: all are on the device


@dataclasses.dataclass
class _Planned:
    plan: Plan
    reads: list[_Read]
    checks: bool  # a spot check: the stored rows are compared, not used


@dataclasses.dataclass
class _Step:
    """The batch that is in training."""

    planned: _Planned
    loaded: Loaded
    rows: list[tuple[_Read, Tensor]]  # sound rows, in memory order
    missing: Rows  # places without a row of any level
    waited: float
    stand_in: Tensor | None = None
    source: list[Tensor] = dataclasses.field(default_factory=list)
    usable: bool = True
    changed_input: bool = False
    began: float | torch.cuda.Event | None = None
    ended: float | torch.cuda.Event | None = None
    computed: Tensor | None = None  # boundary activation to be written
    full: bool = False


class PrefixCache:
    """Plans batches, takes them as they come, and arms the bypass for their training step.

    Everything but the reading and writing of files happens in the training thread.

    Args:
        dataset: the user's, behind plans.
        directory: where stores are.
        limits: of room.
        views: how many variants of each sample are cached; 0: samples are loaded as they come.
        seed: of their randomness.
        observes: whether a batch so many ahead needs the network's real input.

    Attributes:
        messages: what the user should be told, as logging levels and texts; whoever tells it removes it.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        directory: CacheDirectory,
        limits: Limits,
        views: int,
        seed: int,
        observes: Callable[[int], bool],
    ) -> None:
        self.stats = CacheStats()
        self.messages: list[tuple[int, str]] = []
        self.epoch = 0
        self._dataset = dataset
        self._directory = directory
        self._limits = limits
        self._views = views
        self._seed = seed
        self._observes = observes
        self._prefix: FrozenPrefix | None = None
        self._bypass: PrefixBypass | None = None
        self._cut = 0
        self._levels: list[Level] = []
        self._examining = False
        self._examination_planned = False
        self._recording = True
        self._field: InputField | None = None
        self._input_argument: int | None = None
        self._input_is_view = True
        self._compiled = False
        self._single = True
        self._exact = True
        self._sizes: set[int] = set()
        self._first_size = 0
        self._refused_sizes: set[int] = set()
        self._inputs: list[tuple[int, int]] = []
        self._findings: Findings | None = None
        self._weights: list[Tensor] = []
        self._weight_marks: tuple[int, int] = (0, 0)
        self._weight_changes = 0
        self._next = 0
        self._largest = 0
        self._planned: dict[int, _Planned] = {}
        self._received = -1
        self._since_check = 0
        self._step: _Step | None = None
        self._watch: StepWatch | None = None
        self._recorder: CallRecorder | None = None
        self._context = contextlib.ExitStack()
        self._autocast: tuple[str, torch.dtype] | None = None
        self._reader = ReadAhead()
        self._writer = WriteBehind()
        self._write_error: str | None = None
        self._hit_seconds: deque[float] = deque(maxlen=50)
        self._miss_seconds: deque[float] = deque(maxlen=50)
        self._judged = False
        self._closed = False

    # --- what the frozen prefix tells -------------------------------------------------------------------------------

    def prefix_changed(self, prefix: FrozenPrefix) -> None:
        """Drop what is of no use any longer; what was cached of a shallower prefix goes on being of use."""
        if self._closed:
            return  # the callback leaves the model unfrozen at the end of fit
        deeper = self._prefix is prefix and bool(self._levels) and prefix.depth > self._levels[-1].cut
        self._disarm()
        self._remove_bypass()
        self._prefix = prefix
        self._examination_planned = False
        self._planned_anew()
        if not deeper:
            self._drop_levels("unfrozen")
        if prefix.depth == 0:
            self._examining = False
            self._turn_off("nothing is frozen", say=False)
            return
        self.stats.off = None
        self._weight_changes = 0
        self._begin_examination(prefix.depth)

    def _begin_examination(self, cut: int) -> None:
        assert self._prefix is not None
        self._remove_bypass()
        self._cut = cut
        self._compiled = is_compiled(self._prefix.module)
        self._bypass = PrefixBypass(self._prefix.module, self._prefix.chain, cut)
        self._examining, self._examination_planned = True, False
        self._judged = False
        self._hit_seconds.clear()
        self._miss_seconds.clear()
        self._weights = self._prefix_tensors()
        self._weight_marks = _marks_of(self._weights)

    # --- planning: what the batch sampler asks ----------------------------------------------------------------------

    def plan(self, ids: Sequence[int]) -> Plan:
        """What to load for the next batch."""
        number, self._next = self._next, self._next + 1
        self._largest = max(self._largest, len(ids))
        version = self._prefix.version if self._prefix is not None else 0
        plan = Plan(number, tuple(ids), version)
        planned = _Planned(plan, [], False)
        if self.stats.off is None:
            planned = self._plan_cached(plan)
        self._planned[number] = planned
        return planned.plan

    def is_on(self) -> bool:
        """Whether plans are more than ids."""
        return self.stats.off is None

    def forget_plans(self) -> None:
        """The loader begins anew: batches that were planned and did not come will not."""
        self._reader.cancel()
        self._planned.clear()
        self._examination_planned = False
        for level in self._levels:
            with contextlib.suppress(StoreError, OSError):  # then its entries are found to be missing one by one
                level.store.refresh()

    def _plan_cached(self, plan: Plan) -> _Planned:
        ids = np.asarray(plan.ids, np.int64)
        view = self.epoch % self._views if self._views else 0
        entries = ids * max(1, self._views) + view
        seeds = tuple(seed_of(self._seed, int(i), view) for i in ids) if self._views else None
        plan = dataclasses.replace(plan, entries=tuple(entries.tolist()), seeds=seeds)
        if self._examining:
            if self._examination_planned or len(ids) < self._largest:
                return _Planned(plan, [], False)
            self._examination_planned = True
            return _Planned(dataclasses.replace(plan, examine=True), [], False)
        checks = self._is_spot_check()
        stored = np.full(len(ids), -1)
        reads: list[_Read] = []
        for number in reversed(range(len(self._levels))):
            level = self._levels[number]
            places = np.flatnonzero((stored < 0) & level.present(entries))
            if len(places):
                stored[places] = number
                reads.append(self._begin_read(plan.number, level, places, entries[places]))
        whole = checks or self._observes(plan.number - self._received) or not self._is_proven(len(ids))
        newest = len(self._levels) - 1
        plan = dataclasses.replace(
            plan,
            stores=tuple(level.store.folder for level in self._levels),
            stored=tuple((np.full(len(ids), -1) if whole else stored).tolist()),
            input_field=self._field,
            structure=self._findings.structure if self._findings is not None else None,
            keep=(self._recording and bool((stored != newest).any())) or checks,
        )
        return _Planned(plan, reads, checks)

    def _begin_read(self, number: int, level: Level, places: Rows, entries: Rows) -> _Read:
        if level.device.capacity and (level.device.places(entries) >= 0).all():
            return _Read(level, places, entries, None)
        pin = self._device().type == "cuda"
        return _Read(level, places, entries, self._reader.submit(number, lambda: level.read(entries, pin)))

    def _is_proven(self, size: int) -> bool:
        """Whether a sample's activation is the same in batches of this size."""
        return not self._exact or size in self._sizes

    def _is_spot_check(self) -> bool:
        self._since_check += 1
        if self._since_check in (FIRST_SPOT_CHECK, SPOT_CHECK_EVERY_N_BATCHES):
            self._since_check %= SPOT_CHECK_EVERY_N_BATCHES
            return True
        return False

    # --- receiving: what the loader asks for each batch that it hands on --------------------------------------------

    def receive(self, loaded: Loaded, waited: float) -> Any:
        """The user's batch; the bypass is ready for it.

        Args:
            loaded: from the user's DataLoader.
            waited: seconds that training waited for it.
        """
        planned = self._planned.pop(loaded.number)
        self._received = loaded.number
        self._reader.used(loaded.number)
        self._step = None
        plan, current = planned.plan, self._prefix.version if self._prefix is not None else 0
        if self.stats.off is not None or plan.version != current or self._examining != plan.examine:
            self._examination_planned = self._examination_planned and not planned.plan.examine
            return self._whole(planned, loaded)
        began = mark(torch.device("cpu"))
        rows, missing = self._rows(planned, len(loaded.loaded))
        waited += seconds_between(began, mark(torch.device("cpu")))
        step = _Step(planned, loaded, rows, missing, waited)
        absent = np.flatnonzero(~np.asarray(loaded.loaded))
        unknown = np.intersect1d(absent, missing)
        mixed = len({id(read.level) for read, _ in rows}) + bool(len(missing)) > 1
        if len(unknown) or (mixed and len(absent) and not self._single):
            return self._whole(planned, loaded)
        batch = loaded.batch
        if loaded.input_shape is not None:
            assert self._field is not None
            dtype = list(tensor_leaves(batch))[self._field.batch_leaf].dtype
            step.stand_in = stand_in_tensor(loaded.input_shape, dtype, self._device())
            batch = replace_leaf(batch, self._field.batch_leaf, step.stand_in)
        step.source = list(tensor_leaves(batch))
        self.stats.not_loaded += len(absent)
        self._step = step
        return batch

    def _rows(self, planned: _Planned, count: int) -> tuple[list[tuple[_Read, Tensor]], Rows]:
        """What was read and is sound, and the places for which there is nothing."""
        found: list[tuple[_Read, Tensor]] = []
        missing = np.ones(count, bool)
        for read in planned.reads:
            if read.future is None:
                places = read.level.device.places(read.entries)
                rows, sound = read.level.device.take(places), np.ones(len(places), bool)
            else:
                try:
                    rows, sound = read.future.result()
                except (CancelledError, OSError, ValueError):
                    continue
                self.stats.wrong += int((~sound).sum())
                if not sound.all():
                    rows = rows[torch.from_numpy(sound)]
                    read = dataclasses.replace(read, places=read.places[sound], entries=read.entries[sound])
            if len(read.places):
                missing[read.places] = False
                found.append((read, rows))
        return found, np.flatnonzero(missing)

    def _whole(self, planned: _Planned, loaded: Loaded) -> Any:
        """The batch with every input loaded, here and now if need be."""
        if all(loaded.loaded):
            return loaded.batch
        plan = dataclasses.replace(planned.plan, input_field=None, keep=False, examine=False)
        return self._dataset.__getitems__(plan).batch

    # --- the training step ------------------------------------------------------------------------------------------

    def step_begins(self) -> bool:
        """Arm the bypass; returns whether the network is given its real input."""
        step = self._step
        if step is None or self._bypass is None:
            return True
        if not self._weights_are_the_same():
            self._step = None
            if not all(step.loaded.loaded):
                self._step = step  # these activations are of the weights that the prefix had; there is no other input
            else:
                return True
        if step.planned.plan.examine:
            self._begin_watching(step)
            return True
        passage = self._passage(step)
        self._bypass.begin(passage)
        return all(step.loaded.loaded)

    def forward_ended(self) -> None:
        """The forward is over: the bypass is not armed any longer."""
        if self._watch is not None:
            self._context.close()
        step = self._step
        if step is not None and self._bypass is not None and self._bypass.passage is not None:
            passage = self._bypass.passage
            if passage.entry_calls > 1 and self._recorder is None and not all(step.loaded.loaded):
                raise CacheError(
                    "the training step called the network more than once, with an input that was not loaded because "
                    "each step before had called it once. Pass the data module without FrozenPrefixCache"
                )
            self._bypass.end()

    def step_ended(self) -> None:
        """Count, write, and judge."""
        step, self._step = self._step, None
        self.forward_ended()
        watch, self._watch = self._watch, None
        recorder, self._recorder = self._recorder, None
        if self._bypass is not None:
            self._bypass.end()
        if step is None or self._bypass is None or self._prefix is None:
            return
        if watch is not None and recorder is not None:
            self._finish_examination(step, watch, recorder)
            return
        if step.changed_input:
            self._stop(
                "the network was not given what the data loader gave (mixing of samples, augmentation on the device?), "
                "which it had been before"
            )
            return
        self._count(step)
        if not self._is_proven(len(step.loaded.loaded)):
            self._try_size(step)
            if len(step.loaded.loaded) == self._first_size:
                self._write(step)
        elif step.planned.checks and step.full and step.computed is not None:
            self._spot_check(step)
        elif step.computed is not None and self._recording:
            self._write(step)
        self._judge()

    def close(self) -> None:
        """Leave the model as it was, and what was cached on disk. Safe to call twice."""
        self._closed = True
        self._disarm()
        self._remove_bypass()
        self._reader.close()
        self._writer.close()
        self.stats.bytes_on_disk = self._bytes_on_disk()
        for level in self._levels:
            level.store.close()
        self._levels = []
        self._planned.clear()
        self._dataset.close()

    # --- arming -----------------------------------------------------------------------------------------------------

    def _passage(self, step: _Step) -> Passage:
        assert self._bypass is not None
        samples = len(step.loaded.loaded)
        if step.planned.checks or not step.rows or not self._is_proven(samples):
            step.full = True
            return Passage(entered=lambda p, a, k: self._entered(step, a, k), left=lambda t: self._left(step, t, True))
        only = step.rows[0][0].level
        if len(step.rows) == 1 and not len(step.missing):
            skip = self._bypass.position_of(only.cut)
            newest = only is self._levels[-1]
            return Passage(
                skip=skip,
                activation=self._on_device(only, step.rows[0][1]),
                samples=samples,
                entered=lambda p, a, k: self._entered(step, a, k),
                left=lambda t: self._left(step, t, not newest),
            )
        if not self._single:
            step.full = True
            return Passage(entered=lambda p, a, k: self._entered(step, a, k), left=lambda t: self._left(step, t, True))
        passage = Passage(samples=samples)
        passage.left = lambda t: self._left(step, t, False)

        def entered(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entered(step, args, kwargs)
            if not step.changed_input:
                self._complete(step, passage, path, args, kwargs)

        passage.entered = entered
        return passage

    def _entered(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The network is called: see that it gets what the loader gave."""
        step.began = mark(self._device())
        if self._input_argument is None:
            return
        given = list(tensor_leaves((args, kwargs)))
        for argument, leaf in self._inputs:
            wanted = step.source[leaf] if leaf < len(step.source) else None
            if wanted is None or argument >= len(given) or not _is_given(wanted, given[argument]):
                step.changed_input = True
        if not step.changed_input:
            return
        if not all(step.loaded.loaded):
            raise CacheError(
                "the training step changed the input of the network before handing it on, and had not done so when the "
                "cache was set up; that input was not loaded. Pass the data module without FrozenPrefixCache"
            )
        passage = self._bypass.passage if self._bypass is not None else None
        if passage is not None:
            passage.skip = 0

    def _left(self, step: _Step, activation: Tensor, keep: bool) -> None:
        step.ended = mark(self._device())
        if keep and not step.changed_input:
            # What comes next may work in place.
            step.computed = activation.detach().clone(memory_format=torch.preserve_format)

    def _complete(
        self, step: _Step, passage: Passage, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Have the network compute the boundary activations that are missing, and put all in the order of the batch."""
        assert self._bypass is not None
        assert self._prefix is not None
        module = self._prefix.module.get_submodule(path)
        samples = len(step.loaded.loaded)
        newest = self._levels[-1]
        parts: list[tuple[Rows, Tensor]] = []
        computed: list[tuple[Rows, Tensor]] = []
        for read, rows in step.rows:
            activation = self._on_device(read.level, rows)
            if read.level is newest:
                parts.append((read.places, activation))
            else:
                skip = self._bypass.position_of(read.level.cut)
                part = Passage(skip=skip, activation=activation, samples=len(read.places), stop=True)
                computed.append((read.places, self._partly(module, part, args, kwargs, samples, read.places)))
        if len(step.missing):
            part = Passage(stop=True)
            computed.append((step.missing, self._partly(module, part, args, kwargs, samples, step.missing)))
        first = (parts or computed)[0][1]
        whole = newest.form.from_memory(
            torch.empty((samples, *newest.form.shape), dtype=newest.form.dtype, device=first.device)
        )
        for places, activation in (*parts, *computed):
            whole[torch.from_numpy(places).to(whole.device)] = activation
        if computed:
            step.computed = whole.clone(memory_format=torch.preserve_format)
        passage.activation, passage.skip = whole, len(self._bypass.units)

    def _partly(
        self, module: nn.Module, passage: Passage, args: Any, kwargs: Any, samples: int, places: Rows
    ) -> Tensor:
        assert self._bypass is not None
        # A batch of another size may give other bits; some sizes were seen to give the same.
        size = min((s for s in self._sizes if s >= len(places)), default=samples) if self._exact else len(places)
        rows = torch.from_numpy(np.resize(places, size))
        part_args, part_kwargs = rows_of(args, kwargs, samples, rows)
        passage.samples = size
        if passage.activation is not None and size > len(places):
            passage.activation = passage.activation[torch.from_numpy(np.resize(np.arange(len(places)), size))]
        self._bypass.begin(passage)
        with contextlib.suppress(BoundaryReachedError):
            module(*part_args, **part_kwargs)
        if passage.reached is None:
            raise CacheError("the network did not run its frozen layers, which it had when the cache was set up")
        return passage.reached[: len(places)]

    def _on_device(self, level: Level, rows: Tensor) -> Tensor:
        return level.form.from_memory(rows.to(self._device(), non_blocking=True))

    # --- examination ------------------------------------------------------------------------------------------------

    def _begin_watching(self, step: _Step) -> None:
        assert self._bypass is not None
        assert self._prefix is not None
        passage = Passage(entered=lambda p, a, k: self._first_entered(step, a, k))
        passage.left = lambda t: self._left(step, t, True)
        modules = dict(self._prefix.module.named_modules())
        self._recorder = CallRecorder(modules, self._prefix.chain.entries, lambda t: t.detach().clone())
        self._watch = StepWatch(step.source, passage)
        self._bypass.begin(passage)  # outermost, because it ends last
        self._recorder.start()
        self._context.callback(self._recorder.stop)
        self._context.enter_context(eager())  # or the watch would see compiled code instead of operations
        self._inputs = []
        self._input_argument = None
        self._context.enter_context(self._watch)

    def _first_entered(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the tensors of the batch among the arguments of the network."""
        device = self._device()
        enabled = torch.is_autocast_enabled(device.type)
        self._autocast = (device.type, torch.get_autocast_dtype(device.type)) if enabled else None
        samples = len(step.loaded.loaded)
        with contextlib.ExitStack() as stack:
            if self._watch is not None:
                stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
            for number, argument in enumerate(tensor_leaves((args, kwargs))):
                if not argument.ndim or argument.shape[0] != samples:
                    continue
                # A mask may be equal to a cast of the tokens: the tensor itself comes first, then one of its dtype.
                match = [
                    (not _shares_memory(leaf, argument), leaf.dtype != argument.dtype, i)
                    for i, leaf in enumerate(step.source)
                    if _is_given(leaf, argument)
                ]
                if match:
                    self._inputs.append((number, min(match)[2]))
                else:
                    step.changed_input = True
        self._input_argument = self._inputs[0][0] if self._inputs else None

    def _finish_examination(self, step: _Step, watch: StepWatch, recorder: CallRecorder) -> None:
        """Decide what can be cached, from what the step has shown."""
        assert self._bypass is not None
        assert self._prefix is not None
        self._examination_planned = False
        passage, findings = watch._passage, step.loaded.findings
        self._examining = False
        if findings is None:
            self._examining = True  # the batch came without; the next one is asked again
            return
        if findings.problem is not None:
            self._stop(findings.problem)
            return
        if passage.reached is None:
            self._examining = True  # a step that did not run the network
            return
        if step.changed_input or not self._inputs:
            self._stop(
                "the network is not given what the data loader gave (mixing of samples, normalisation or augmentation "
                "in the training step?), so its frozen front has no fixed output for a sample"
            )
            return
        if len(recorder.calls) != len({call.entry for call in recorder.calls}):
            self._stop("the training step calls the network more than once")
            return
        field = next(
            (f for f in findings.inputs if f.batch_leaf in {leaf for _, leaf in self._inputs} and not f.varies), None
        )
        argument = next((a for a, leaf in self._inputs if field is not None and leaf == field.batch_leaf), None)
        self._bypass.learn(passage)
        modules = dict(self._prefix.module.named_modules())
        if watch.prefix_used is not None:
            proof = Proof(f"{watch.prefix_used} behind the boundary uses what was computed in front of it", True)
        else:
            proof = Prover(
                modules, self._bypass, recorder.calls, passage, argument, self._autocast, self._compiled
            ).prove()
        if proof.problem is not None:
            if proof.repairable and self._cut > max((level.cut for level in self._levels), default=0) + 1:
                self._begin_examination(self._cut - 1)
            elif self._levels:
                self._begin_serving_old()
            else:
                self._stop(proof.problem)
            return
        self._findings = findings
        self._first_size = len(step.loaded.loaded)
        self._exact, self._sizes, self._refused_sizes = proof.exact, set(proof.sizes), set()
        self._single = passage.single
        if self._compiled:
            # The proof ran uncompiled code, which may round otherwise: whole batches show what the compiled code gives.
            self._exact, self._sizes, self._single = True, set(), False
        needed = None if field is None else watch.input_used.get(field.batch_leaf)
        absent = field is not None and proof.without_input and needed is None
        self._field = field if absent else None
        self._open_level(step, findings, proof, needed)

    def _begin_serving_old(self) -> None:
        """The newly frozen layers cannot be left out; those that were can still be."""
        assert self._prefix is not None
        self._remove_bypass()
        self._cut = self._levels[-1].cut
        self._bypass = PrefixBypass(self._prefix.module, self._prefix.chain, self._cut)
        self._begin_examination(self._cut)

    def _open_level(self, step: _Step, findings: Findings, proof: Proof, needed: str | None) -> None:
        assert self._prefix is not None
        assert step.computed is not None
        form = RowForm.of(step.computed)
        samples = len(self._dataset)
        entries = samples * max(1, self._views)
        about = {
            "model": type(self._prefix.module).__name__,
            "boundary": self._prefix.chain.layer_modules[self._cut - 1].boundary,
            "data": type(self._dataset.dataset).__name__,
            "samples": str(samples),
            "augmentation_views": str(self._views),
            "row": f"{'x'.join(map(str, form.shape))} {form.dtype}",
        }
        fingerprint = self._fingerprint(findings, form)
        field_bytes = 0 if self._field is None else max(64, FIELD_SLACK * findings.field_bytes)
        manifest = Manifest(fingerprint, entries, form.row_bytes, field_bytes, str(form.dtype), form.order, about)
        size = entries * manifest.slot_bytes
        try:
            store, room = self._directory.open(manifest, self._limits.max_bytes, self._limits.min_free_bytes)
        except StoreError as error:
            self._stop(str(error))
            return
        device = self._device()
        self._levels.append(
            Level(
                self._cut,
                form,
                store,
                MemoryTier(self._limits.host_bytes, form, entries, torch.device("cpu")),
                MemoryTier(self._limits.device_bytes if device.type != "cpu" else 0, form, entries, device),
            )
        )
        self._recording = True
        self._write_error = None
        self.stats.cut = self._cut
        inputs = "inputs need not be loaded" if self._field is not None else "inputs are loaded all the same"
        if self._field is None:
            reason = findings.must_load or (f"{needed} uses them" if needed else "more than the prefix needs them")
            inputs += f" ({reason})"
        share = "" if size <= room else f", of which {room / size:.0%} fit"
        known = int(np.count_nonzero(store.index))
        found = f"; {known} entries are there already" if known else ""
        place = "" if proof.exact else "; the last bits depend on where in a batch a sample is, and may differ"
        self._say(
            f"the outputs of {about['boundary']!r} will take up to {size / 1e9:.2f} GB in {store.folder} "
            f"({entries} entries of {manifest.slot_bytes} bytes){share}; {inputs}{found}{place}"
        )
        if self._compiled:
            return
        self._verify_present(step)
        if self._levels and self._recording:
            self._write(step)

    def _verify_present(self, step: _Step) -> None:
        """Entries of an earlier run must be those of this one."""
        level = self._levels[-1]
        assert step.computed is not None
        entries = np.asarray(step.planned.plan.entries, np.int64)
        places = np.flatnonzero(level.present(entries))
        if len(places):
            rows, sound = level.read(entries[places], pin=False)
            self._compare(step, places[sound], rows[torch.from_numpy(sound)])

    def _compare(self, step: _Step, places: Rows, rows: Tensor) -> None:
        level = self._levels[-1]
        assert step.computed is not None
        fresh = level.form.to_memory(step.computed.cpu())[torch.from_numpy(places)]
        wrong = [p for p, a, b in zip(places, fresh, rows, strict=True) if not rows_alike(a, b)]
        fields = step.loaded.fields
        if self._field is not None and fields is not None:
            for place in places:
                kept = level.store.read_fields(step.planned.plan.entries[place])
                if kept is not None and fields[place] is not None and kept != fields[place]:
                    wrong.append(place)
        if wrong:
            self.stats.wrong += len(set(wrong))
            sample = step.planned.plan.ids[wrong[0]]
            self._drop_levels(f"what is cached of sample {sample} is not what it gives now", warn=True)
            if self._weight_changes < WEIGHT_CHANGES_TO_STOP:
                self._weight_changes += 1
                self._begin_examination(self._cut)
            else:
                self._stop("cached outputs were wrong several times")

    def _spot_check(self, step: _Step) -> None:
        for read, rows in step.rows:
            if self._levels and read.level is self._levels[-1]:
                self._compare(step, read.places, rows.cpu())
                return

    def _try_size(self, step: _Step) -> None:
        """A batch of another size ran whole: is what it gives what is cached?"""
        size = len(step.loaded.loaded)
        read, rows = next(((r, rows) for r, rows in step.rows if r.level is self._levels[-1]), (None, None))
        if read is None or rows is None or len(read.places) < size or step.computed is None:
            return
        if size in self._refused_sizes:
            return
        fresh = read.level.form.to_memory(step.computed.cpu())
        (self._sizes if same_leaf(fresh.contiguous(), rows.cpu()) else self._refused_sizes).add(size)

    def _fingerprint(self, findings: Findings, form: RowForm) -> str:
        assert self._prefix is not None
        assert self._bypass is not None
        digest = hashlib.blake2b(digest_size=16)
        device = self._device()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        modules = dict(self._prefix.module.named_modules())
        parts = [torch.__version__, device.type, name, str(self._autocast), str(form), findings.fingerprint]
        parts += [str(self._views), str(self._seed if self._views else 0), str(self._field is not None)]
        parts += [f"{unit}: {modules[unit]!r}" for unit in self._bypass.units]
        parts.append(repr(self._prefix.chain.layer_modules[self._cut - 1].output_leaf))
        for part in parts:
            digest.update(part.encode() + b"\0")
        for tensor in self._weights:
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    # --- weights ----------------------------------------------------------------------------------------------------

    def _prefix_tensors(self) -> list[Tensor]:
        assert self._prefix is not None
        assert self._bypass is not None
        modules = dict(self._prefix.module.named_modules())
        names = set(self._prefix.chain.prefix_parameters(self._cut))
        found = [p for name, p in self._prefix.module.named_parameters() if name in names]
        for unit in self._bypass.units:
            found += [*modules[unit].parameters(), *modules[unit].buffers()]
        return list({id(tensor): tensor for tensor in found}.values())

    def _weights_are_the_same(self) -> bool:
        if not self._levels:
            return True
        marks = _marks_of(self._weights)
        if marks == self._weight_marks:
            return True
        self._weight_marks = marks
        assert self._findings is not None
        if self._fingerprint(self._findings, self._levels[-1].form) == self._levels[-1].store.manifest.fingerprint:
            return True
        self._weight_changes += 1
        self._drop_levels("the weights of frozen layers have changed", warn=True)
        if self._weight_changes >= WEIGHT_CHANGES_TO_STOP:
            self._stop("the weights of frozen layers keep changing")
        else:
            self._begin_examination(self._cut)
        return False

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, step: _Step) -> None:
        """Have the new rows written, in the background."""
        if self._write_error is not None:
            self._end_recording(self._write_error)
            return
        level = self._levels[-1]
        activation, fields = step.computed, step.loaded.fields
        if activation is None or (self._field is not None and fields is None):
            return
        if RowForm.of(activation) != level.form:
            return  # of another size: never a hit
        entries = np.asarray(step.planned.plan.entries, np.int64)
        new = ~level.present(entries)
        if self._field is not None and fields is not None:
            new &= np.array([field is not None for field in fields])
        places = np.flatnonzero(new)
        if not len(places):
            return
        kept = tuple(
            (fields[place] or b"") if self._field is not None and fields is not None else b"" for place in places
        )
        rows = level.form.to_memory(activation)
        if level.device.capacity:
            level.device.put(entries[places], rows[torch.from_numpy(places).to(rows.device)])
        size = len(places) * level.store.manifest.slot_bytes
        if not self._has_room(level, size):
            return
        host = rows.cpu()

        def write() -> None:
            try:
                self.stats.written += level.write(entries[places], host[torch.from_numpy(places)].contiguous(), kept)
            except OSError as error:
                self._write_error = f"writing to {level.store.folder} failed: {error.strerror or error}"

        self._writer.submit(write, size)

    def _has_room(self, level: Level, size: int) -> bool:
        try:
            free = shutil.disk_usage(level.store.folder).free
        except OSError:
            free = 0
        if not level.store.exists:
            self._end_recording(f"{level.store.folder} is gone")
            return False
        limit = self._limits.max_bytes
        if limit is not None and self._bytes_on_disk() + size > limit:
            self._end_recording(f"max_bytes={limit} is reached")
            return False
        if free - size < self._limits.min_free_bytes:
            self._end_recording(f"less than min_free_bytes={self._limits.min_free_bytes} would be left on the disk")
            return False
        return True

    def _end_recording(self, reason: str) -> None:
        if self._recording:
            self._recording = False
            level = self._levels[-1]
            count = int(np.count_nonzero(level.store.index))
            self._warn(
                f"no more outputs of frozen layers are written: {reason}. {count} of {len(level.store.index)} entries "
                "are there and stay in use; all other samples run the frozen layers"
            )

    def _bytes_on_disk(self) -> int:
        with contextlib.suppress(OSError):
            return sum(level.store.disk_bytes for level in self._levels)
        return 0

    # --- counting and judging ---------------------------------------------------------------------------------------

    def _count(self, step: _Step) -> None:
        samples = len(step.loaded.loaded)
        newest = self._levels[-1] if self._levels else None
        hits = 0 if step.full else sum(len(read.places) for read, _ in step.rows if read.level is newest)
        advanced = 0 if step.full else sum(len(read.places) for read, _ in step.rows) - hits
        self.stats.hits += hits
        self.stats.advanced += advanced
        self.stats.misses += samples - hits - advanced
        if step.began is None or step.ended is None:
            return
        if isinstance(step.ended, torch.cuda.Event):
            step.ended.synchronize()
        seconds = (step.waited + seconds_between(step.began, step.ended)) / samples
        if hits == samples:
            self._hit_seconds.append(seconds)
        elif hits + advanced == 0 and all(step.loaded.loaded):
            self._miss_seconds.append(seconds)
        if self._hit_seconds and self._miss_seconds and hits:
            gain = statistics.median(self._miss_seconds) - statistics.median(self._hit_seconds)
            self.stats.seconds_saved += hits * gain

    def _judge(self) -> None:
        """It pays or it stops."""
        if self._judged or min(len(self._hit_seconds), len(self._miss_seconds)) < COMPARED_STEPS:
            return
        self._judged = True
        hit, miss = statistics.median(self._hit_seconds), statistics.median(self._miss_seconds)
        text = f"a sample takes {hit * 1e3:.3f} ms from the cache and {miss * 1e3:.3f} ms without, depth {self._cut}"
        if hit < miss:
            self._say(f"it pays: {text}")
        else:
            self._drop_levels("it does not pay")
            self._turn_off(f"it does not pay: {text}")

    # --- ending -----------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        self._drop_levels(reason)
        self._turn_off(reason)

    def _turn_off(self, reason: str, say: bool = True) -> None:
        self._remove_bypass()
        self._examining = False
        self.stats.off = reason
        self.stats.cut = 0
        if say:
            self._warn(f"the cache of the frozen layers is off: {reason}. Training goes on without it")

    def _drop_levels(self, reason: str, warn: bool = False) -> None:
        if not self._levels:
            return
        self._reader.cancel()
        self._writer.finish()
        for level in self._levels:
            level.store.close()
            self._directory.remove(level.store.folder)
        self._levels = []
        self._field = None
        self.stats.cut = 0
        if warn:
            self._warn(f"{reason}; what was cached is dropped")

    def _planned_anew(self) -> None:
        self._since_check = 0

    def _disarm(self) -> None:
        self._context.close()
        self._step = self._watch = self._recorder = None
        if self._bypass is not None:
            self._bypass.end()

    def _remove_bypass(self) -> None:
        if self._bypass is not None:
            self._bypass.end()
            self._bypass = None

    def _device(self) -> torch.device:
        assert self._prefix is not None
        return next((tensor.device for tensor in self._prefix.module.parameters()), torch.device("cpu"))

    def _say(self, text: str) -> None:
        self.messages.append((logging.INFO, text))

    def _warn(self, text: str) -> None:
        self.messages.append((logging.WARNING, text))


def seed_of(seed: int, sample_id: int, view: int) -> int:
    """Seed of one view of one sample's randomness: a hash, so that neighbours have nothing in common.

    >>> seed_of(0, 1, 0) != seed_of(0, 0, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {sample_id} {view}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def _is_given(leaf: Tensor, argument: Tensor) -> bool:
    """Whether the network is given this tensor of the batch: itself, another view of all of it, or a copy."""
    if leaf.numel() != argument.numel():
        return False
    if _shares_memory(leaf, argument):
        return True
    moved = leaf.to(argument.device, argument.dtype).reshape(-1)
    return same_leaf(moved, argument.detach().reshape(-1))


def _shares_memory(first: Tensor, second: Tensor) -> bool:
    return first.device == second.device and first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _marks_of(tensors: list[Tensor]) -> tuple[int, int]:
    """Rises with each change in place, and differs for other memory."""
    return sum(tensor._version for tensor in tensors), sum(tensor.data_ptr() for tensor in tensors)
