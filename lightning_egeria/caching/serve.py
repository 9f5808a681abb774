"""Where a row comes from: one batch under the cache, from its arrival to its end.

The walk of a cached batch:

1.  `planner.Planner` plans the batch: which samples have entries of every cached value, so that they need not be
    loaded, and has the entries read ahead (`reads`).
2.  `loading.PlannedDataset` loads the other samples where the user's DataLoader loads. Inputs that were left out are
    lazy tensors; the user's collate function works on these.
3.  `CachedBatch` receives the batch. The training step runs on it. Frozen modules record their calls (`frozen`), and
    so do pure operations; their results are lazy tensors, too.
4.  Something needs the values of a lazy tensor: a module that trains, a loss, a print. That is a *demand*.
    `lazy.tape.Node.ask` calls `CachedBatch.asked`, which serves it:

    a.  Entries of this computation: rows whose sample, and whatever the program made of it, are those of the entry
        (`_stored`). The frozen modules must be as they were.
    b.  Rows without an entry are computed from the nearest cached values (`_some_rows`), or else from the samples,
        which are loaded now if they were left out. They become entries.
    c.  A computation that is not cached is computed from the nearest cached values. If the program asks for it
        again in another batch, it becomes a cached value, if that pays (`policy`).

5.  The batch ends (`finish`): what the program still holds is computed, and the statistics count it.

Within a batch each value is computed once, by whatever it is asked for: it stays at its node.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_egeria.caching.entries import CachedValue, Found
from lightning_egeria.caching.frozen import FrozenModules
from lightning_egeria.caching.plan import Loaded, Mode
from lightning_egeria.caching.record.meta import version_of
from lightning_egeria.caching.record.sending import receive
from lightning_egeria.caching.record.tape import UNKNOWN, Node, Tape
from lightning_egeria.caching.record.tensors import caller
from lightning_egeria.caching.record.units import UnitCall, precision_of
from lightning_egeria.caching.store.rows import LARGEST_STEP, Flags, RowForm, Rows, laid_out
from lightning_egeria.caching.store.samples import stamp_of
from lightning_egeria.core.profiling.clock import mark, wait_for
from lightning_egeria.core.snapshots.digests import same_bits
from lightning_egeria.errors import CacheError

if TYPE_CHECKING:
    from lightning_egeria.caching.stream import Stream

ROUNDING = 32  # last bits by which a row may differ at another place in the batch
UNPROVEN_STEP = 2**-8  # tolerance, relative to the largest value, for batch sizes that were never compared
Made = npt.NDArray[np.uint64]


class Read(NamedTuple):
    """Rows of a cached value that are being read, for some samples of a plan or, by ``rows``, for some of the batch."""

    value: CachedValue
    places: Rows
    future: Future[Found]
    rows: Rows | None = None

    def in_order(self, order: list[int]) -> Read:
        """Return the read of some samples of a plan, for the rows of a batch in another order."""
        at = {position: number for number, position in enumerate(self.places.tolist())}
        places = [row for row, position in enumerate(order) if position in at]
        rows = [at[order[row]] for row in places]
        return Read(self.value, np.array(places, np.int64), self.future, np.array(rows, np.int64))


class Output(NamedTuple):
    """What the program got of a cached value, of all rows of a batch.

    Attributes:
        value: ``[rows, ...]``.
        version: its version counter then.
        made: digest of what the program made of each row: ``[rows]``.
        state: `FrozenModules.version` then.
    """

    value: Tensor
    version: int
    made: Made
    state: int

    @staticmethod
    def joined(parts: Sequence[tuple[Output, Rows]]) -> Output | None:
        """Return some rows of several outputs of one computation; None if one was changed in place."""
        first, _ = parts[0]
        if any(one.version != version_of(one.value) or one.state != first.state for one, _ in parts):
            return None
        if any(one.value.shape[1:] != first.value.shape[1:] for one, _ in parts):
            return None
        value = torch.cat([one.value[torch.from_numpy(rows).to(one.value.device)] for one, rows in parts])
        return Output(value, version_of(value), np.concatenate([one.made[rows] for one, rows in parts]), first.state)


def joined(parts: Sequence[tuple[dict[int, Output], Rows]]) -> dict[int, Output] | None:
    """Return some rows of the outputs of several batches, by the keys of the computations; None if there are none."""
    common = set.intersection(*(set(outputs) for outputs, _ in parts))
    found = {key: Output.joined([(outputs[key], rows) for outputs, rows in parts]) for key in common}
    return {key: output for key, output in found.items() if output is not None} or None


def is_rounding(first: Tensor, second: Tensor, step: float | None = None) -> bool:
    """Whether two tensors of one shape differ by a few last bits, or a share, of their largest value at most."""
    if first.shape != second.shape or not first.dtype.is_floating_point:
        return False
    largest = second.abs().amax().double()
    most = largest * (ROUNDING * torch.finfo(first.dtype).eps if step is None else step)
    return bool((first.double() - second.double()).abs().amax() <= most)


def agree(form: RowForm, known: Tensor, found: Tensor, proven: bool, precision: torch.dtype) -> bool:
    """Whether rows of entries are what was computed again, to rounding.

    Args:
        form: of the entries.
        known: rows of entries, ``[samples, ...]``.
        found: the same, computed again.
        proven: whether it was computed in a batch of a size whose rows have the same bits.
        precision: in which both were computed, such as that of autocast.
    """
    found = form.rounded(found)
    step = ROUNDING * torch.finfo(precision).eps if precision.is_floating_point else 0.0
    step = max(step, LARGEST_STEP if form.rounds else 0.0, 0.0 if proven else UNPROVEN_STEP)
    return same_bits(known, found) or is_rounding(known, found, step)


def paths_behind(node: Node) -> frozenset[str]:
    """Return the paths of the frozen modules that a value follows from."""
    calls = [one.call.run for one in node.before(lambda _: False) if one.call is not None]
    return frozenset(path for run in calls if isinstance(run, UnitCall) for path in run.paths)


def sizes_behind(node: Node) -> frozenset[tuple[int, ...]]:
    """Return the shapes of what a value follows from, by sample."""
    leaves = node.leaves()
    return frozenset(tuple(one.meta.shape if one.row is not None else one.meta.shape[1:]) for one in leaves)


class CachedBatch:
    """A batch of a training or validation loader while the network has frozen modules.

    Args:
        stream: the stream that it belongs to.
        frozen: the frozen modules that it was planned for; None if these have changed.
        loaded: what was loaded.
        reads: its rows, while they are being read.
        waited: seconds that the program waited for it.

    Attributes:
        batch: the user's batch, with lazy tensors for inputs of frozen modules.
        tape: its recorded operations.
        eager: whether frozen modules run at once; so in a probe.
        demands: values that the program asked for, with frozen modules behind them.
        matches: how many of these are cached values, or are not worth it.
        rejected: rows whose entries were of other samples, or of other inputs.
        ran: which rows ran through a frozen module, ``[samples]``.
        advanced: which of these were computed from a cached value.
        is_looked_at: the model runs on it, and some of its rows may be trained then.
        outputs: what the program got, by computation, if it is looked at.
        ready: outputs in memory for these rows, by computation.
        seconds: that it took to serve or compute what was asked for.
        recording: seconds of these, and of the wait, in which entries were made.
        around: seconds that the cache took around the step.
        running: seconds in which frozen modules ran for the program.
        served: whether all of that came from entries.
        is_timed: whether its time tells what reading entries takes, or computing.
        was_touched: what first needed an input that was not loaded, in words; None if nothing did.
        problem: why a value that was asked for in a probe cannot be kept; None if it can.
        may_be_chance: whether the problem may be one of this batch only.
        whole_fields: in a probe, the encoded fields with the inputs of frozen modules.
        waiting: rows that become entries at the end of a probe.
        sizes: shapes of what the program made of each sample for the last value, as far as they may be others in each
            batch; None if no such value was asked for.
    """

    def __init__(
        self, stream: Stream, frozen: FrozenModules | None, loaded: Loaded, reads: list[Read], waited: float
    ) -> None:
        self.plan = loaded.plan
        self.loaded = loaded
        self.frozen = frozen
        self.waited = waited
        self.eager = self.plan.mode is Mode.PROBE and not len(stream.values)
        self.entries: Rows = np.asarray(self.plan.entries, np.int64)
        self.demands = self.matches = self.rejected = 0
        self.is_looked_at = False
        self.outputs: dict[int, Output] = {}
        self.ready: dict[int, Output] = {}
        self.is_timed = True
        self.was_touched: str | None = None
        self.sizes: frozenset[tuple[int, ...]] | None = None
        self.seconds, self.served = 0.0, True
        self.recording, self.around, self.running = 0.0 if stream.accounts.loads_ahead else loaded.recording, 0.0, 0.0
        self.problem: str | None = None
        self.may_be_chance = False
        self.whole_fields: tuple[bytes | None, ...] = ()
        self.waiting: list[tuple[CachedValue, Node, Tensor]] = []
        self._noted: set[int] = set()
        self._made: set[int] = set()  # nodes whose values were computed from the samples
        self._at_once: set[int] = set()  # outputs that may become entries, and were not asked for yet
        self._is_over = self._is_kept = self._doubts = False
        self._depth = 0
        self._is_same: bool | None = None
        self._defers: bool | None = None
        self._stream = stream
        self.reads = reads
        self.tape = Tape(stream.keys, len(self.plan.ids), lambda places: stream.load(self, places), self._touched, self)
        self.batch = receive(loaded.batch, self.tape)
        loaded.batch, self.lazy, self.fields = None, loaded.lazy, loaded.fields
        order = self.tape.order
        if order is not None and order != list(range(len(self.plan.ids))):
            self.entries = self.entries[order]
            self.lazy = tuple(self.lazy[position] for position in order)
            self.fields = tuple(self.fields[position] for position in order)
            self.reads = [read.in_order(order) for read in reads]
        self.ran = np.zeros(self.samples, bool)
        self.advanced = np.zeros(self.samples, bool)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.tape.size

    @property
    def wants_inner(self) -> bool:
        """Whether values are kept that larger modules would hide, so that frozen layers are called one by one."""
        return self._stream.values.are_nested

    @property
    def defers(self) -> bool:
        """Whether calls of frozen modules are recorded, and run when their values are needed, if ever.

        If the modules are not those of the entries, they run when they are called.
        """
        if self._defers is None:
            frozen = self.frozen
            self._defers = not self.eager and frozen is not None and self.frozen_is_same()
        return self._defers

    def takes_outside(self, path: str, tensors: Sequence[Tensor]) -> bool:
        """Whether a frozen module may begin with tensors that the program made, such as normalised images.

        Once the program has asked for a value, its tensors may follow from modules that train.
        """
        if path in self._stream.without_outside or self.demands:
            return False
        return any(tensor.ndim > 0 and tensor.shape[0] == self.samples for tensor in tensors)

    # --- demands -----------------------------------------------------------------------------------------------------

    def asked(self, node: Node) -> Tensor:
        """Return a value that the program asks for, with frozen modules behind it."""
        frozen = self.frozen
        if frozen is None or frozen is not self._stream.frozen or node.name == UNKNOWN or self._depth:
            return node.compute()
        is_new = node.number in self._at_once and self._stream.values.has(node.key)
        if node.value is not None and not is_new and (not self.eager or node.number in self._noted):
            return node.value
        self._depth += 1
        started = time.perf_counter()
        try:
            if self.eager:
                self._noted.add(node.number)
                value = node.compute()
                self._ran(slice(None), from_samples=True)
                node.value = self._stream.probe(self, node, value)
            else:
                node.value = self._value(node)
        finally:
            self._depth -= 1
            if frozen.device.type == "cuda" and self.is_timed and not self._is_kept:
                wait_for(mark(frozen.device))
            self.seconds += time.perf_counter() - started
        return node.value

    def ran_for(self, seconds: float) -> None:
        """A frozen module ran for the program."""
        self.running += seconds
        if not self._depth:  # else it is counted with the demand
            self.seconds += seconds

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """While the cache does what the program did not ask for."""
        started, running = time.perf_counter(), self.running
        try:
            with self._stream.spending():
                yield
        finally:
            self.running = running
            self.seconds -= time.perf_counter() - started if self._depth else 0.0

    def _value(self, node: Node) -> Tensor:
        """Return the value of all rows."""
        self.demands += 1
        value = self._stream.values.of(node.key, node.meta.shape[1:]) if node.meta.shape else None
        if not self.defers or node.number in self._at_once:  # the frozen modules have run
            found = node.compute()
            if node.number in self._at_once:
                self._at_once.remove(node.number)
            else:
                self._ran(slice(None), from_samples=True)
                self._made.add(node.number)
            if value is not None:
                self.matches += 1
                value.asked = self._stream.epoch
                self._stream.record(self, value, node, found, np.arange(self.samples))
                return value.form.rounded(found)
            self._stream.not_cached(self, node, found)
            return found
        if value is None or node.meta.shape[:1] != (self.samples,):
            found = self._all_rows(node)
            self._stream.not_cached(self, node, found)
            return found
        self.matches += 1
        if self._stream.shuffled and self.tape.has_outside:  # else they do not count
            self.sizes = sizes_behind(node)
        value.asked = self._stream.epoch
        if (ready := self._ready(value, node)) is not None:
            return ready
        verdict = value.sizes.verdict(self.samples)
        have, rows = self._stored(value, node) if verdict is not False else (np.zeros(self.samples, bool), None)
        if verdict is not True or rows is None:
            found = self._all_rows(node)
            if verdict is None and rows is not None and have.all():
                self._stream.compared(self, value, same_bits(rows, value.form.rounded(found)))
            self._stream.record(self, value, node, found, np.arange(self.samples))
            return self._keep(value, node, value.form.rounded(found))
        if not have.all():
            places = np.flatnonzero(~have)
            missing = self._some_rows(node, places)
            if missing is None:
                return self._all_rows(node)
            whole = value.form.empty(self.samples, rows.device)
            whole[torch.from_numpy(np.flatnonzero(have)).to(rows.device)] = rows
            whole[torch.from_numpy(places).to(rows.device)] = value.form.rounded(missing)
            self._stream.record(self, value, node, missing, places)
            rows = whole
        if self._doubts or (self.plan.checks and not self._agrees(value, node, rows)):
            return self._all_rows(node)
        if rows.is_inference() and not torch.is_inference_mode_enabled():
            rows = rows.clone()
        return self._keep(value, node, laid_out(rows, node.meta.shape, node.meta.stride))

    def _all_rows(self, node: Node) -> Tensor:
        """Compute a value from the nearest cached ones, in the order of the program."""
        for start in self._nearest(node):
            start.value = self._value(start)
        self._check_deferred()
        order = node.before(lambda one: one.value is not None)
        starts = [one for each in order for one in each.arguments() if one.frozen and one.value is not None]
        from_samples = not starts or any(one.number in self._made for one in starts)
        frozen = self.frozen
        before = set(frozen.ran) if frozen is not None else set()
        found = node.compute()
        if frozen is not None and frozen.ran - before:
            self._ran(slice(None), from_samples)
        if from_samples:
            self._made.add(node.number)
        return found

    def _some_rows(self, node: Node, places: Rows) -> Tensor | None:
        """Compute some rows of a value, in a batch of the same size; None if that is not possible."""
        padded = np.resize(places, self.samples)
        given: dict[Node, Tensor] = {}
        for start in self._nearest(node):
            rows = self._rows(start, places)
            if rows is None:
                return None
            chosen = rows[torch.from_numpy(np.resize(np.arange(len(places)), self.samples)).to(rows.device)]
            given[start] = laid_out(chosen, start.meta.shape, start.meta.stride)
        if not self._stream.outside.fits(node):
            return None
        self._check_deferred()
        found = self._stream.outside.replayed(node, padded.tolist(), given)
        if found is None or found.shape != node.meta.shape:
            return None
        self._ran(places, from_samples=not given)
        return found[: len(places)]

    def _check_deferred(self) -> None:
        """Look whether modules that were called are still as they were, before they run.

        Raises:
            CacheError: they have changed meanwhile.
        """
        frozen = self.frozen
        if self._defers and frozen is not None and not self._is_kept and any(map(frozen.has_waited, frozen.changed())):
            raise CacheError(
                "the weights of frozen modules changed between a call of theirs and the use of its output in the same "
                "step. Leave out FrozenPrefixCache, or change them before the call"
            )

    def _rows(self, node: Node, places: Rows) -> Tensor | None:
        """Return some rows of a cached value, from entries or computed."""
        if node.value is not None:
            return node.value[torch.from_numpy(places).to(node.value.device)]
        value = self._stream.values.of(node.key, node.meta.shape[1:])
        have, rows = self._stored(value, node) if value is not None else (np.zeros(self.samples, bool), None)
        if rows is None or not have[places].all():
            return self._some_rows(node, places)
        at = np.cumsum(have) - 1
        return rows[torch.from_numpy(at[places]).to(rows.device)]

    def _nearest(self, node: Node) -> list[Node]:
        """Return the nearest nodes behind one whose values are cached, and not there yet."""
        found: dict[int, Node] = {}
        waiting, seen = list(node.arguments()), set[int]()
        while waiting:
            one = waiting.pop()
            if one.number in seen or not one.frozen:
                continue
            seen.add(one.number)
            if one.value is not None:
                continue  # `compute` begins there
            if one.name != UNKNOWN and one.meta.shape[:1] == (self.samples,):
                value = self._stream.values.of(one.key, one.meta.shape[1:])
                if value is not None and value.sizes.verdict(self.samples):
                    found[one.number] = one
                    continue
            waiting.extend(one.arguments())
        return [found[number] for number in sorted(found)]

    def ran_at_once(self, nodes: Sequence[Node], is_kept: bool) -> None:
        """A frozen module ran when it was called, on a cached value, or for one (``is_kept``)."""
        starts = [one for one in nodes[0].arguments() if one.frozen]
        from_samples = not starts or any(one.number in self._made for one in starts)
        if not self.eager and (is_kept or starts):
            self._ran(slice(None), from_samples)
            self._made.update(node.number for node in nodes if from_samples)
            self._at_once.update(node.number for node in nodes if is_kept)

    def _ran(self, rows: Any, from_samples: bool) -> None:
        self.ran[rows] = True
        self.advanced[rows] |= not from_samples
        self.served = False

    # --- entries -----------------------------------------------------------------------------------------------------

    def _stored(self, value: CachedValue, node: Node) -> tuple[Flags, Tensor | None]:
        """Return which rows have sound entries, and these rows; None without one."""
        have = np.zeros(self.samples, bool)
        frozen = self.frozen
        read = next((one for one in self.reads if one.value is value), None)
        if read is None or frozen is None or read.future.cancelled():
            return have, None
        if (made := self._stream.outside.stamps(node)) is None:
            return have, None
        data, read_rows, known = read.future.result()
        chosen = np.arange(len(read.places)) if read.rows is None else read.rows
        sound = read_rows[chosen] & self._is_of(read, known[chosen], made)
        value.unmatched = 0 if sound.any() else value.unmatched + 1
        self.rejected = max(self.rejected, int((~sound).sum()))
        if not sound.any() or not self.frozen_is_same():
            return have, None
        data = data.to(frozen.device, non_blocking=True)
        if value.device.capacity and read.rows is None and sound.all():
            value.device.put(self.entries[read.places], data)
        rows = value.form.from_memory(data)
        if read.rows is not None or not sound.all() or not read_rows.all():
            kept = (np.cumsum(read_rows) - 1)[chosen[sound]]
            rows = rows[torch.from_numpy(kept).to(rows.device)]
        have[read.places[sound]] = True
        return have, rows

    def _is_of(self, read: Read, known: npt.NDArray[np.uint64], made: Made) -> Flags:
        """Which entries were computed from these samples, and from what the program made of them; ``[places]``."""
        value, entries = read.value, self.entries[read.places]
        lazy = np.array(self.lazy, bool)[read.places]
        same: Flags = (made[read.places] == known[:, 1]) & (~lazy | value.verified[entries])  # in doubt since then?
        changed, doubt = [], False
        for at, place in enumerate(read.places.tolist()):
            if lazy[at]:
                continue
            fields = self.fields[place]
            stamp = stamp_of(fields) if fields is not None else None
            if stamp != known[at, 0]:
                same[at] = False
                if stamp != value.stamps[entries[at], 0]:  # else it was written again since
                    changed.append(entries[at])
                    doubt |= bool(value.verified[entries[at]])
            else:
                value.verify(entries[at], self.plan.doubts)
        if changed:
            self._stream.forget(value, np.array(changed), doubt)
            self._doubts |= doubt and any(self.lazy)
        return same

    def frozen_is_same(self) -> bool:
        """Whether the frozen modules are those that entries were computed by; looked at when the first is called."""
        if self._is_same is None:
            self._is_same = self._stream.frozen_is_same()
        return self._is_same

    def _ready(self, value: CachedValue, node: Node) -> Tensor | None:
        """Return an output in memory, if it belongs to these rows; None otherwise."""
        ready = self.ready.pop(node.key, None)  # the program may change it
        made = self._stream.outside.stamps(node)
        if ready is None or made is None or self.frozen is None or ready.state != self.frozen.version:
            return None
        if ready.value.shape != node.meta.shape or not np.array_equal(ready.made, made):
            return None
        if not value.sizes.verdict(self.samples) or not self.frozen_is_same():
            return None
        self.is_timed = False
        return laid_out(ready.value, node.meta.shape, node.meta.stride)

    def _keep(self, value: CachedValue, node: Node, found: Tensor) -> Tensor:
        """Keep what the program gets, for a batch of some of these rows."""
        if self.is_looked_at and self.frozen is not None and self.frozen_is_same():
            made = self._stream.outside.stamps(node)
            if made is not None and len(found) == self.samples:
                self.outputs[node.key] = Output(found, version_of(found), made, self.frozen.version)
        return found

    def _agrees(self, value: CachedValue, node: Node, whole: Tensor) -> bool:
        """Whether the frozen modules compute for the samples to check what their entries say, to rounding."""
        order = self.tape.order or range(len(self.plan.ids))
        places = np.array([row for row, position in enumerate(order) if position in self.plan.checks], np.int64)
        self.is_timed = False
        if not len(places):  # the collate function has left them out
            return True
        reads, self.reads = self.reads, []  # computed from the samples
        found = self._some_rows(node, places)
        self.reads = reads
        known = whole[torch.from_numpy(places).to(whole.device)]
        if found is None or agree(value.form, known, found, True, precision_of(node)):
            return True
        self._stream.differs(len(places))
        return False

    # --- its end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The batch is over: compute what the program still holds of frozen modules."""
        self._is_kept = True
        self.tape.settle(computed_only=True)
        self._is_over = True
        for read in self.reads:
            read.future.cancel()
        self._stream.finish(self)

    def settle(self) -> None:
        """Compute what the program has kept of the batch."""
        self._is_kept = True
        self.tape.settle()

    def drop(self) -> None:
        """The batch does not run."""
        self._is_over, self.frozen = True, None
        for read in self.reads:
            read.future.cancel()

    def _touched(self) -> None:
        if self.was_touched is None and any(self.lazy):
            package = str(Path(__file__).parents[1])
            self.was_touched = "something that keeps a batch after its step" if self._is_kept else caller(package)
            if self._is_over and self.frozen is not None:  # else it is counted at the end
                self._stream.touched_late(self)
