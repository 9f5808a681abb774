"""From the batches of a training run to cached ones, without a trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd

from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.examination import Examination, Verdict
from lightning_egeria.caching.hooks import BatchHooks
from lightning_egeria.caching.levels import Level, Pieces, RowForm, Rows, pieces_of
from lightning_egeria.caching.loading import Loaded, Plan, PlannedDataset
from lightning_egeria.caching.opening import Cut, LevelMaker
from lightning_egeria.caching.planning import Planner
from lightning_egeria.caching.proof import rows_alike
from lightning_egeria.caching.receiving import Receiver, has_rows
from lightning_egeria.caching.recording import Limits, Recording, bytes_on_disk
from lightning_egeria.caching.samples import same_leaf
from lightning_egeria.caching.stats import Accounts, CacheStats
from lightning_egeria.caching.steps import Step
from lightning_egeria.caching.store import StoreError
from lightning_egeria.caching.terms import Terms
from lightning_egeria.network.prefix import FrozenPrefix

CHANGES_TO_STOP = 3  # of weights or data under one frozen prefix
COUNT_EVERY_S = 1.0
LAST_BITS = "the last bits depend on where in a batch a sample is, and may differ"
EXAMINATIONS_TO_STOP = 10  # of batches that show nothing


class PrefixCache:
    """Plans batches, takes them as they come, and has each training step go by what is cached.

    Everything but the reading and writing of files happens in the training thread.

    Args:
        dataset: the user's, behind plans.
        directory: where stores are.
        limits: of room.
        views: how many variants of each sample are cached; 0: samples are loaded as they come.
        seed: of their randomness.
        observes: whether a batch so many ahead needs the network's real input.
        hooks: what those of the user may do with a batch.

    Attributes:
        stats: what was done so far.
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
        hooks: BatchHooks,
    ) -> None:
        self.stats = CacheStats()
        self.messages: list[tuple[int, str]] = []
        self._warned: set[str] = set()
        self._told_of_dropout = False
        self._dataset = dataset
        self._directory = directory
        self._maker = LevelMaker(dataset, directory, limits, views, seed)
        self._hooks = hooks
        self._planner = Planner(views, seed, observes)
        self._receiver = Receiver(dataset, self._planner, self.stats)
        self._prefix: FrozenPrefix | None = None
        self._device = torch.device("cpu")
        self._cut: Cut | None = None
        self._levels: list[Level] = []
        self._dropped: list[Path] = []
        self._changes = 0
        self._made_varies = False
        self._data_changes = dataset.changes
        self._step: Step | None = None
        self._examination: Examination | None = None
        self._recording = Recording(limits, self.stats, self._warn)
        self._accounts = Accounts(self.stats)
        self._closed = False
        self._recorded, self._counted_at = 0.0, 0.0

    # --- what the frozen prefix tells -------------------------------------------------------------------------------

    def prefix_changed(self, prefix: FrozenPrefix) -> None:
        """Drop what is of no use any longer; what was cached of a shallower prefix goes on being of use."""
        if self._closed:
            return  # the callback leaves the model unfrozen at the end of fit
        prefix.eval_all()
        self._tell_of_dropout(prefix)
        self._load_after_all()
        deeper = self._prefix is prefix and bool(self._levels) and prefix.depth > self._levels[-1].cut
        self._end_step()
        self._prefix = prefix
        self._device = next((tensor.device for tensor in prefix.module.parameters()), torch.device("cpu"))
        self._planner.restart(self._device)
        self._changes = 0
        if not deeper:
            self._drop_levels()
        if prefix.settled_depth:
            self.stats.off = None
            self._begin_cut(prefix, prefix.settled_depth)
        else:
            self._cut = None
            self.stats.off = "frozen statistics still settle" if prefix.depth else "nothing is frozen"

    def _tell_of_dropout(self, prefix: FrozenPrefix) -> None:
        if self._told_of_dropout:
            return
        modules = dict(prefix.module.named_modules())
        for path in prefix.chain.members(prefix.depth):
            module = modules[path]
            if isinstance(module, _DropoutNd) and module.p > 0:
                self._told_of_dropout = True
                self._say(
                    f"dropout in frozen layers ({path!r}, say) is off from here on, because what is cached must be the "
                    "same each time; without FrozenPrefixCache it stays on"
                )
                return

    def _begin_cut(self, prefix: FrozenPrefix, depth: int) -> None:
        self._cut = Cut(prefix, depth, self._device)
        self._receiver.restart(self._device)
        self._accounts.restart()

    # --- planning: what the batch sampler asks ----------------------------------------------------------------------

    def plan(self, ids: Sequence[int]) -> Plan:
        """What to load for the next batch."""
        cut = self._cut
        terms = cut.terms if cut is not None else None
        return self._planner.plan(ids, self._version, cut is not None, terms, self._levels, self._records)

    def is_on(self) -> bool:
        """Whether plans are more than ids."""
        return self._cut is not None

    def begin_epoch(self, epoch: int, epochs: int | None) -> None:
        """The loader begins anew: batches that were planned and did not come will not.

        Args:
            epoch: that begins.
            epochs: of the whole run, if each of them has every sample once at most; None: nobody knows.
        """
        self._planner.begin_epoch(epoch, epochs)
        for level in self._levels:
            with contextlib.suppress(StoreError, OSError):  # then its entries are found to be missing one by one
                level.store.refresh()
        for level in self._levels[:-1]:
            if not (level.store.index.astype(bool) & (self._levels[-1].store.index == 0)).any():
                self._levels.remove(level)  # all of it has been advanced
                self._drop(level)
        if self._dropped:
            self._remove_dropped()

    @property
    def _records(self) -> bool:
        return self._recording.active and self._planner.is_read_again

    @property
    def _version(self) -> int:
        return self._prefix.version if self._prefix is not None else 0

    # --- receiving: what the loader asks for each batch that it hands on --------------------------------------------

    def receive(self, loaded: Loaded, waited: float) -> Any:
        """The user's batch; the bypass is ready for it.

        Args:
            loaded: from the user's DataLoader.
            waited: seconds that training waited for it.
        """
        planned = self._planner.take(loaded.number)
        self._step = None
        if self._data_changed() or (self._levels and self._weights_changed()):
            return self._receiver.whole(planned, loaded)
        cut = self._cut
        if cut is None or planned.plan.version != self._version or (cut.terms is None) != planned.plan.examine:
            return self._receiver.whole(planned, loaded)
        if loaded.odd or not has_rows(loaded, cut.terms):
            if planned.plan.examine:
                self._finish_without_terms(cut, Verdict(again=True))
            return self._receiver.whole(planned, loaded)
        received = self._receiver.step_of(planned, loaded, cut.terms, waited)
        if received is None:
            return self._receiver.whole(planned, loaded)
        self._step, batch = received
        return batch

    # --- the training step ------------------------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> None:
        """The batch is on its device."""
        if self._step is not None:
            self._step.arrive(batch)

    def step_begins(self) -> bool:
        """Arm the bypass; returns whether the network is given its real input."""
        step, cut, prefix = self._step, self._cut, self._prefix
        if step is None or cut is None or prefix is None:
            return True
        findings, step.armed = step.loaded.findings, True
        if findings is not None:
            self._examination = Examination(
                prefix, cut.bypass, step, findings, cut.compiled, self._hooks, self._made_varies
            )
            self._examination.begin()
            return True
        if cut.terms is None:
            return True
        load = functools.partial(self._receiver.real_input, step, cut.terms)
        cut.bypass.begin(step.passage(cut.bypass, cut.terms, self._levels, prefix.module, load, self._records))
        return step.all_loaded

    def forward_ended(self) -> None:
        """The forward is over: nothing is in the way of the network any longer."""
        if self._examination is not None:
            self._examination.end_forward()
        if self._cut is not None:
            self._cut.bypass.end()

    def step_ended(self) -> None:
        """Count, write, and judge."""
        step, cut, examination = self._step, self._cut, self._examination
        self._end_step()
        if step is None or cut is None:
            return
        if examination is not None:
            self._finish_examination(step, cut, examination)
            return
        if step.changed_input:
            self._stop(
                "the network was not given what the data loader gave (mixing of samples, augmentation on the device?), "
                "which it had been before"
            )
            return
        if step.changed_argument is not None:
            self._stop(
                f"the network was given something else as its argument {step.changed_argument} than before, and its "
                "frozen layers may use it; if only layers behind them do, hand it on as a tensor",
                cause="an argument of the network",
            )
            return
        if cut.terms is None:
            return
        self._accounts.count(step, self._levels[-1])
        if step.made_compared and cut.terms.made.varies(step.changed_made is not None):
            self._made_changed(step, cut)
            return
        if step.made_differs:
            self._write(step, cut.terms)  # of samples that have no entry
        elif not cut.terms.is_proven(step.samples):
            self._try_size(step, cut.terms)
            if step.samples == cut.terms.first_size:
                self._write(step, cut.terms)
        elif step.planned.checks and step.full and step.computed is not None:
            self._spot_check(step, cut)
        elif step.computed is not None:
            self._write(step, cut.terms)
        self._judge(cut)

    def progress(self) -> str | None:
        """How much of the newest level is there, in words; None while nothing is cached, and when all of it is."""
        if not self._levels or self._cut is None or not self._records:
            return None
        now = time.monotonic()
        if now - self._counted_at > COUNT_EVERY_S:  # a bar asks at each step, and there may be millions of entries
            index = self._levels[-1].store.index
            self._counted_at, self._recorded = now, np.count_nonzero(index) / max(1, len(index))
        return f"{self._recorded:.0%}" if self._recorded < 1 else None

    def measure_disk(self) -> None:
        """Bring ``stats.bytes_on_disk`` up to date."""
        if self._levels:
            self.stats.bytes_on_disk = bytes_on_disk(self._levels)

    def close(self) -> None:
        """Leave the model as it was, and what was cached on disk. Safe to call twice."""
        self._closed = True
        self._end_step()
        self._planner.close()
        self._recording.close()
        self.measure_disk()
        for level in self._levels:
            level.store.close()
        self._levels = []
        self._remove_dropped()

    def _end_step(self) -> None:
        self.forward_ended()
        self._step = self._examination = None

    def _load_after_all(self) -> None:
        """The prefix changes between the coming of a batch and its step: put the real input in its place."""
        step, terms = self._step, self._cut.terms if self._cut is not None else None
        if step is None or step.armed or terms is None or terms.input_field is None:
            return
        real = self._receiver.real_input(step, terms)
        if real is not None:
            step.replace(terms.input_field.batch_leaf, real)

    def _write(self, step: Step, terms: Terms) -> None:
        if self._records:
            self._recording.write(step, self._levels, step.fields(terms))

    # --- after the examination --------------------------------------------------------------------------------------

    def _finish_examination(self, step: Step, cut: Cut, examination: Examination) -> None:
        verdict = examination.verdict()
        if verdict.terms is not None:
            cut.findings, cut.autocast = step.loaded.findings, examination.autocast
            self._open_level(step, cut, verdict)
        else:
            self._finish_without_terms(cut, verdict)

    def _finish_without_terms(self, cut: Cut, verdict: Verdict) -> None:
        """Try another batch, or another boundary, or stop."""
        if verdict.again and cut.examinations < EXAMINATIONS_TO_STOP:
            cut.examinations += 1
            return
        # Where the newly frozen layers cannot all be left out, those that were can still be.
        depth = max((level.cut for level in self._levels), default=0)
        if verdict.shallower:
            depth = max(depth, cut.depth - verdict.shallower)
        if self._prefix is None or depth in (0, cut.depth):
            self._stop(verdict.problem or f"none of {EXAMINATIONS_TO_STOP} batches showed whether it can be done")
        else:
            self._begin_cut(self._prefix, depth)

    def _open_level(self, step: Step, cut: Cut, verdict: Verdict) -> None:
        terms = verdict.terms
        if terms is None or step.computed is None:
            raise RuntimeError("there is nothing to cache")
        form = RowForm.of(step.computed, terms.length_leaf is not None)
        fingerprint = self._maker.fingerprint(cut, form, terms)
        if self._levels and self._levels[-1].store.manifest.fingerprint == fingerprint:
            cut.terms = terms  # the layers behind it froze and cannot be left out
            return
        try:
            opened = self._maker.open(cut, step, form, terms, fingerprint)
        except StoreError as error:
            self._stop(str(error), cause="the store")
            return
        for level in self._levels:  # the new one gets all the memory
            level.release_memory()
        self._levels.append(opened.level)
        cut.terms = terms
        self._recording.restart(self._maker.taken_by_others(self._levels))
        self.stats.cut = cut.depth
        inputs = "inputs need not be loaded"
        if verdict.reason_to_load is not None:
            inputs = f"inputs are loaded all the same ({verdict.reason_to_load})"
        known = int(np.count_nonzero(opened.level.store.index))
        found = f"; {known} entries are there already" if known else ""
        place = "" if terms.exact else f"; {LAST_BITS}"
        late = "" if self._records else "; nothing is written any more, since the run would not read it again"
        self._say(f"{opened.text}; {inputs}{found}{place}{late}")
        if not terms.compiled:  # or the examined step was computed by other code than the next ones
            self._verify_present(step, cut, opened.lengths)
            if self._levels and terms.input_field is None and not form.ragged:
                self._write(step, terms)

    def _verify_present(self, step: Step, cut: Cut, lengths: Sequence[int] | None) -> None:
        """Entries of an earlier run must be those of this one."""
        level, entries = self._levels[-1], step.entries
        places = np.flatnonzero(level.present(entries))
        if len(places):
            rows, sound = level.read(entries[places], pin=False)
            self.stats.wrong += int((~sound).sum())
            self._compare(step, cut, places[sound], rows, lengths)

    def _spot_check(self, step: Step, cut: Cut) -> None:
        for read, rows in step.rows:
            if read.level is self._levels[-1]:
                self._compare(step, cut, read.places, rows, step.loaded.lengths)
                return

    def _compare(self, step: Step, cut: Cut, places: Rows, rows: Pieces, lengths: Sequence[int] | None) -> None:
        """Drop the newest level if it does not hold what a step has computed."""
        level = self._levels[-1]
        if step.computed is None:
            return
        fresh = pieces_of(level.form, step.computed.cpu(), lengths).rows()
        stored = dataclasses.replace(rows, data=rows.data.cpu()).rows()
        wrong = [place for place, row in zip(places, stored, strict=True) if not rows_alike(fresh[place], row)]
        fields = step.fields(cut.terms) if cut.terms is not None else None
        if level.store.manifest.field_bytes and fields is not None:
            for place in places:
                kept = level.store.read_fields(step.planned.plan.entries[place])
                if kept is not None and fields[place] is not None and kept != fields[place]:
                    wrong.append(place)
        if wrong:
            self.stats.wrong += len(set(wrong))
            sample = step.planned.plan.ids[wrong[0]]
            self._start_over(cut, f"what is cached of sample {sample} is not what it gives now")
        elif cut.terms is not None and cut.terms.exact:
            cut.terms.exact = all(same_leaf(fresh[place], row) for place, row in zip(places, stored, strict=True))
            if not cut.terms.exact:
                self._say(LAST_BITS)

    def _try_size(self, step: Step, terms: Terms) -> None:
        """A batch of another size ran whole: is what it gives what is cached?"""
        read, rows = next(((r, rows) for r, rows in step.rows if r.level is self._levels[-1]), (None, None))
        if read is None or rows is None or len(read.places) < step.samples or step.computed is None:
            return
        fresh = pieces_of(read.level.form, step.computed.cpu(), step.loaded.lengths)
        terms.try_size(step.samples, same_leaf(fresh.data, rows.data.cpu()))

    def _data_changed(self) -> bool:
        before, self._data_changes = self._data_changes, self._dataset.changes
        if self._cut is None or before == self._data_changes:
            return False
        self._start_over(self._cut, "the samples may have changed (an attribute of the dataset was set)")
        return True

    def _weights_changed(self) -> bool:
        if self._cut is None or not self._cut.weights.have_changed():
            return False
        self._start_over(self._cut, "the weights of frozen layers have changed")
        return True

    def _made_changed(self, step: Step, cut: Cut) -> None:
        """Again and again, the training step makes something else of a sample than when its entry was written."""
        if step.changed_made is None:
            raise RuntimeError("there is no such sample")
        entry, level = step.changed_made
        sample = step.planned.plan.ids[step.planned.plan.entries.index(entry)]
        if level.is_found:
            self._start_over(cut, f"what the training step makes of sample {sample} is not what was cached of it")
            return
        self._made_varies = True  # a boundary in front of what reads it may still do
        self._drop_levels([level for level in self._levels if level.made.numbers])
        if self._prefix is not None:
            self._begin_cut(self._prefix, cut.depth)

    def _start_over(self, cut: Cut, reason: str) -> None:
        """Something changed under the cache: nothing of it is used any longer."""
        self._drop_levels()
        self._changes += 1
        if self._changes >= CHANGES_TO_STOP or self._prefix is None:
            self._stop(f"{reason}, for the {self._changes}. time")
        else:
            self._warn(f"{reason}; all that was cached of them is dropped", reason)
            self._begin_cut(self._prefix, cut.depth)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _judge(self, cut: Cut) -> None:
        """It pays or it stops."""
        judgement = self._accounts.judgement()
        if judgement is None:
            return
        pays, numbers = judgement
        if pays:
            self._say(f"it pays: {numbers}, depth {cut.depth}")
        else:
            self._stop(f"it does not pay: {numbers}, depth {cut.depth}", cause="it does not pay")

    def _stop(self, reason: str, cause: str | None = None) -> None:
        self._drop_levels()
        self._cut = None
        self.stats.off = reason
        text = f"the cache of the frozen layers is off: {reason}. Training goes on without it"
        if self._told_of_dropout:
            text += "; leave FrozenPrefixCache out to have the dropout of frozen layers on"
        self._warn(text, cause or reason)

    def _drop_levels(self, levels: Sequence[Level] | None = None) -> None:
        """All, or some of them."""
        if not self._levels:
            return
        self._planner.forget_rows()
        self._recording.finish()
        dropped = list(self._levels if levels is None else levels)
        for level in dropped:
            self._drop(level)
        self._levels = [level for level in self._levels if level not in dropped]
        self.stats.cut = self._levels[-1].cut if self._levels else 0
        self._remove_dropped()

    def _drop(self, level: Level) -> None:
        level.store.close()
        self._dropped.append(level.store.folder)

    def _remove_dropped(self) -> None:
        """Delete stores that are of no use; a worker process may have one open for some more batches."""
        self._dataset.close()
        self._dropped = [folder for folder in self._dropped if folder.exists() and not self._directory.remove(folder)]

    def _say(self, text: str) -> None:
        self.messages.append((logging.INFO, text))

    def _warn(self, text: str, cause: str) -> None:
        """Each freeze begins anew, and what was in the way before may be so again: that is no news."""
        self.messages.append((logging.INFO if cause in self._warned else logging.WARNING, text))
        self._warned.add(cause)
