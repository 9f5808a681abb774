"""One training step from the cache: which rows are there, and how the network gets by without its frozen prefix."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.arguments import Part, has_values_of, is_given, is_view, shares_memory, version_of
from lightning_egeria.caching.bypass import BoundaryReachedError, Passage, PrefixBypass, rows_of
from lightning_egeria.caching.findings import random_state, same_random_state
from lightning_egeria.caching.levels import Flags, Level, Pieces, Rows
from lightning_egeria.caching.loading import Loaded, Plan
from lightning_egeria.caching.made import DIGEST_BYTES, UNKNOWN, Digests, MadeArguments
from lightning_egeria.caching.terms import Terms
from lightning_egeria.errors import CacheError
from lightning_egeria.profiling.clock import mark


@dataclasses.dataclass
class Read:
    """Rows of one level for some places of a batch."""

    level: Level
    places: Rows
    entries: Rows
    future: Future[tuple[Pieces, Flags]] | None  # None: all are on the device


@dataclasses.dataclass
class PlannedBatch:
    """A batch that was planned: its rows are being read, and its samples loaded."""

    plan: Plan
    reads: list[Read] = dataclasses.field(default_factory=list)
    checks: bool = False  # a spot check: the stored rows are compared, not used


class Step:
    """The batch that is in training.

    Args:
        planned: the plan, and the reads.
        loaded: what has come.
        rows: sound rows with their reads.
        missing: places without a row of any level.
        waited: seconds that training waited for the batch and its rows.
        device: that trains.

    Attributes:
        source: the tensors of the batch, on their device.
        length: what its samples are padded to, if they differ in length.
        changed_input: the network was given something else than the batch.
        changed_argument: name of another argument of the network that was not what it had been; None: none was.
        made_compared: what the training step makes was compared with what entries were computed of.
        made_differs: something that the training step makes is not what an entry was computed of, or cannot be known
            again.
        changed_made: an entry that was computed of something else, and the level that has it; None: there is none.
        digest_seconds: what it took to know what the training step makes.
        random_state: of all generators, before anybody did anything with the batch; of a batch that is examined.
        began: the network was called.
        ended: the boundary was passed.
        computed: boundary activation that was computed in this step, all of the batch.
        full: the whole prefix ran for all samples.
        armed: its forward is about to run, or has.
    """

    def __init__(
        self,
        planned: PlannedBatch,
        loaded: Loaded,
        rows: list[tuple[Read, Pieces]],
        missing: Rows,
        waited: float,
        device: torch.device,
    ) -> None:
        self.planned = planned
        self.loaded = loaded
        self.rows = rows
        self.missing = missing
        self.waited = waited
        self.device = device
        self.source: list[Tensor] = []
        self._handed_on: list[tuple[Tensor, int | None]] = []
        self._arrived: list[int | None] = []
        self.length: int | None = None
        self.changed_input = False
        self.changed_argument: str | None = None
        self.made_compared = self.made_differs = False
        self.changed_made: tuple[int, Level] | None = None
        self.digest_seconds = 0.0
        self._digests: Digests | None = None
        self.random_state: tuple[Any, ...] | None = None
        self.began: float | torch.cuda.Event | None = None
        self.ended: float | torch.cuda.Event | None = None
        self.computed: Tensor | None = None
        self.full = False
        self.armed = False

    def hand_on(self, batch: Any) -> None:
        """The batch is on its way to the device."""
        self._handed_on = [(leaf, version_of(leaf)) for leaf in tensor_leaves(batch)]
        self.random_state = self._random_state() if self.planned.plan.examine else None

    def arrive(self, batch: Any) -> None:
        """The batch is on its device."""
        self.source = list(tensor_leaves(batch))
        self._arrived = [version_of(leaf) for leaf in self.source]

    def is_untouched(self, leaf: int) -> bool:
        """Whether a tensor of the batch was not changed in place, neither on its way nor since."""
        handed_on, version = self._handed_on[leaf]
        return version == version_of(handed_on) and self._arrived[leaf] == version_of(self.source[leaf])

    def came_as_loaded(self, leaf: int) -> bool:
        """Whether a tensor of the batch is, value by value, what the data loader gave."""
        handed_on, source = self._handed_on[leaf][0], self.source[leaf]
        return handed_on is source or has_values_of(handed_on, source)

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since the batch was handed on, for whatever."""
        before, now = self.random_state, self._random_state()
        return before is None or not same_random_state(before, now) or not torch.equal(before[-1], now[-1])

    def _random_state(self) -> tuple[Any, ...]:
        gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.empty(0)
        return (*random_state(), gpu)

    def fields(self, terms: Terms) -> Sequence[bytes | None] | None:
        """What the entry of each sample holds besides its activation; None for those that cannot be written."""
        if terms.input_field is not None:
            return self.loaded.fields
        if not terms.made.numbers:
            return [b""] * self.samples
        if self._digests is None:
            return None
        return [int(one).to_bytes(DIGEST_BYTES, "little") if one != UNKNOWN else None for one in self._digests]

    def replace(self, leaf: int, real: Tensor) -> None:
        """Put what was loaded after all in the place of a stand-in."""
        self.source[leaf].data = real.to(self.source[leaf].device, self.source[leaf].dtype)
        self._arrived[leaf] = version_of(self.source[leaf])

    @property
    def samples(self) -> int:
        """Of the batch."""
        return len(self.loaded.loaded)

    @property
    def all_loaded(self) -> bool:
        """Whether the input of every sample is there."""
        return all(self.loaded.loaded)

    @property
    def entries(self) -> Rows:
        """Numbers of the samples' entries."""
        return np.asarray(self.planned.plan.entries, np.int64)

    def passage(
        self,
        bypass: PrefixBypass,
        terms: Terms,
        levels: Sequence[Level],
        module: nn.Module,
        load: Callable[[], Tensor | None],
        records: bool,
    ) -> Passage:
        """How this step goes through the prefix.

        Args:
            bypass: of the prefix.
            terms: that were found for it.
            levels: that are cached, the newest last.
            module: the model in training.
            load: loads the input that is not there after all; None: it is.
            records: whether what is computed may be written.
        """
        newest = levels[-1]
        mixed = len(self.rows) + bool(len(self.missing)) > 1
        self.full = self.planned.checks or not self.rows or not terms.is_proven(self.samples)
        self.full = self.full or (mixed and not terms.single)
        passage = Passage(samples=self.samples, length=self.length)
        passage.left = lambda activation: self._left(activation, keep=self.full)
        if not self.full and not mixed:
            level, rows = self.rows[0][0].level, self.rows[0][1]
            passage.activation = rows.batch(level.form, self.length, self.device)
            passage.skip = bypass.position_of(level.cut)
            passage.left = lambda activation: self._left(activation, keep=self.full or level is not newest)

        def entered(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entered(args, kwargs, terms)
            given = list(tensor_leaves((args, kwargs)))
            needs_gradient = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in given)
            if self.changed_argument is not None or needs_gradient:
                self._fill_in(load(), given, terms)
            if self.changed_input or self.changed_argument is not None:
                passage.skip = 0
            # The gradient of a loss by the input, say, goes through the frozen layers.
            elif needs_gradient or not self._are_made_of_the_same(given, newest, records):
                passage.skip, self.full = 0, True
            elif mixed and not self.full:
                parts = _Parts(bypass, terms, newest, module.get_submodule(path), args, kwargs, self)
                passage.activation, passage.skip = parts.whole(), len(bypass.units)

        passage.entered = entered
        return passage

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any], terms: Terms) -> None:
        """The network is called: see that it gets what the loader gave."""
        self.began = mark(self.device)
        given = list(tensor_leaves((args, kwargs)))
        for argument, leaf, layout in terms.inputs:
            if argument >= len(given) or leaf >= min(len(self.source), len(self._handed_on)):
                self.changed_input = True
                continue
            shared = not self.all_loaded or shares_memory(self.source[leaf], given[argument])
            if isinstance(layout, Part) or (layout is not None and shared):
                # Whatever is done to NaN gives NaN: values would show nothing.
                self.changed_input |= not is_view(self.source[leaf], given[argument], layout)
            else:
                self.changed_input |= not is_given(self.source[leaf], given[argument])
            self.changed_input = self.changed_input or not self.is_untouched(leaf)
            self.changed_input |= terms.may_change and not self.came_as_loaded(leaf)
        if self.changed_input and not self.all_loaded:
            raise CacheError(
                "the training step changed the input of the network before handing it on, and had not done so when the "
                "cache was set up; that input was not loaded. Pass the data module without FrozenPrefixCache"
            )

        self.changed_argument = terms.others.changed(args, kwargs, self.samples, self.length)

    def _are_made_of_the_same(self, given: list[Tensor], newest: Level, records: bool) -> bool:
        """Whether all rows were computed of what the network is given now, as far as the training step makes that."""
        began = time.perf_counter()
        found: dict[tuple[int, ...], Digests] = {}

        def digests(made: MadeArguments) -> Digests:
            if made.numbers not in found:
                found[made.numbers] = made.digests(given, self.samples, self.loaded.lengths, self.length)
            return found[made.numbers]

        if newest.made.numbers and (records or self.rows):
            self._digests = digests(newest.made)
        for read, rows in self.rows:
            if not read.level.made.numbers:
                continue
            self.made_compared = True
            now = digests(read.level.made)[read.places]
            before = rows.digests if rows.digests is not None else np.full(len(now), UNKNOWN, np.uint64)
            self.made_differs = self.made_differs or bool(((before != now) | (now == UNKNOWN)).any())
            changed = np.flatnonzero((before != now) & (before != UNKNOWN) & (now != UNKNOWN))
            if len(changed):
                self.changed_made = self.changed_made or (int(read.entries[changed[0]]), read.level)
        self.digest_seconds = time.perf_counter() - began
        return not self.made_differs

    def _fill_in(self, real: Tensor | None, given: list[Tensor], terms: Terms) -> None:
        """Write the real input over its stand-in, and over all copies of that."""
        if real is None or terms.input_field is None:
            return
        source = self.source[terms.input_field.batch_leaf].data
        source.copy_(real)
        for argument, leaf, layout in terms.inputs:
            if leaf == terms.input_field.batch_leaf and layout is None:
                given[argument].data.copy_(source.reshape(given[argument].shape))

    def _left(self, activation: Tensor, keep: bool) -> None:
        self.ended = mark(self.device)
        if keep and not self.changed_input and self.changed_argument is None:
            # What comes next may work in place.
            self.computed = activation.detach().clone(memory_format=torch.preserve_format)


@dataclasses.dataclass
class _Parts:
    """Has the network compute what is missing of a batch, and puts all in order."""

    bypass: PrefixBypass
    terms: Terms
    newest: Level
    network: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: Step

    def whole(self) -> Tensor:
        """The boundary activation of the batch."""
        step, form = self.step, self.newest.form
        parts: list[tuple[Rows, Tensor]] = []
        for read, rows in step.rows:
            activation = rows.batch(read.level.form, step.length, step.device)
            if read.level is not self.newest:
                skip = self.bypass.position_of(read.level.cut)
                passage = Passage(skip=skip, activation=activation, length=step.length, stop=True)
                activation = self._run(passage, read.places)
                step.computed = activation
            parts.append((read.places, activation))
        if len(step.missing):
            step.computed = self._run(Passage(stop=True, length=step.length), step.missing)
            parts.append((step.missing, step.computed))
        shape = (step.samples, *form.row_shape(step.length or 0))
        whole = form.from_memory(torch.empty(shape, dtype=form.dtype, device=step.device))
        for places, activation in parts:
            whole[torch.from_numpy(places).to(step.device)] = activation
        if step.computed is not None:
            step.computed = whole.clone(memory_format=torch.preserve_format)
        return whole

    def _run(self, passage: Passage, places: Rows) -> Tensor:
        samples = self.step.samples
        # A batch of another size may give other bits; some sizes were seen to give the same.
        size = self.terms.size_for(len(places), samples)
        rows = torch.from_numpy(np.resize(places, size))
        args, kwargs = rows_of(self.args, self.kwargs, samples, rows)
        passage.samples = size
        if passage.activation is not None and size > len(places):
            passage.activation = passage.activation[torch.from_numpy(np.resize(np.arange(len(places)), size))]
        self.bypass.begin(passage)
        with contextlib.suppress(BoundaryReachedError):
            self.network(*args, **kwargs)
        if passage.reached is None:
            raise CacheError("the network did not run its frozen layers, which it had when the cache was set up")
        return passage.reached[: len(places)]
