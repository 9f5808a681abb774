"""A batch has come: what is there of it, and what the training step is given."""

from __future__ import annotations

import dataclasses
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.levels import Flags, Pieces, Rows
from lightning_egeria.caching.loading import Loaded, PlannedDataset, replace_leaf
from lightning_egeria.caching.planning import Planner
from lightning_egeria.caching.samples import stand_in_tensor
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.caching.steps import PlannedBatch, Read, Step
from lightning_egeria.caching.terms import Terms
from lightning_egeria.profiling.clock import mark, seconds_between


class Receiver:
    """Makes training steps of the batches that come.

    Args:
        dataset: loads what was not loaded after all.
        planner: is told of entries that are of other samples than was thought.
        stats: wrong entries, and inputs that were not loaded, are counted there.
    """

    def __init__(self, dataset: PlannedDataset, planner: Planner, stats: CacheStats) -> None:
        self._dataset = dataset
        self._planner = planner
        self._stats = stats
        self._device = torch.device("cpu")
        self._kept_stand_in: Tensor | None = None

    def restart(self, device: torch.device) -> None:
        """Another prefix is left out, on this device."""
        self._device = device
        self._kept_stand_in = None

    def step_of(
        self, planned: PlannedBatch, loaded: Loaded, terms: Terms | None, waited: float
    ) -> tuple[Step, Any] | None:
        """The step and its batch, as the user's code is given it; None: that must be `whole`.

        Args:
            planned: what was asked for.
            loaded: what has come.
            terms: on which activations stand for the prefix; None: the batch is to be examined.
            waited: seconds that training waited for it.
        """
        began = mark(torch.device("cpu"))
        length = _length(loaded, terms)
        rows, missing = self._rows(planned, len(loaded.loaded), length, loaded.fields)
        waited += seconds_between(began, mark(torch.device("cpu")))
        absent = np.flatnonzero(~np.asarray(loaded.loaded))
        mixed = len(rows) + bool(len(missing)) > 1
        if len(np.intersect1d(absent, missing)) or (mixed and len(absent) and terms and not terms.single):
            return None
        batch = loaded.batch
        if loaded.input_shape is not None and terms is not None and terms.input_field is not None:
            number = terms.input_field.batch_leaf
            dtype = list(tensor_leaves(batch))[number].dtype
            batch = replace_leaf(batch, number, self._stand_in(loaded.input_shape, dtype, terms))
        step = Step(planned, loaded, rows, missing, waited, self._device)
        step.length = length
        step.hand_on(batch)
        self._stats.not_loaded += len(absent)
        return step, batch

    def whole(self, planned: PlannedBatch, loaded: Loaded) -> Any:
        """The batch with every input loaded, here and now if need be."""
        if all(loaded.loaded):
            return loaded.batch
        plan = dataclasses.replace(planned.plan, input_field=None, length_leaf=None, keep=False, examine=False)
        return self._dataset.__getitems__(plan).batch

    def real_input(self, step: Step, terms: Terms) -> Tensor | None:
        """The input of a step that was not loaded; None: it was."""
        if step.all_loaded or terms.input_field is None:
            return None
        self._kept_stand_in = None  # the real one may be written over it
        return list(tensor_leaves(self.whole(step.planned, step.loaded)))[terms.input_field.batch_leaf]

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype, terms: Terms) -> Tensor:
        """For the input of a whole batch: the last one again, unless it was changed since."""
        kept = self._kept_stand_in
        if kept is None or kept._version or (kept.shape, kept.dtype, kept.device) != (shape, dtype, self._device):
            kept = _stand_in_batch(shape, terms.input_order, dtype, self._device, terms.copies_input)
            self._kept_stand_in = kept
        return kept.detach()

    def _rows(
        self, planned: PlannedBatch, count: int, length: int | None, fields: tuple[bytes | None, ...] | None
    ) -> tuple[list[tuple[Read, Pieces]], Rows]:
        """What was read and is sound, and the places for which there is nothing."""
        found: list[tuple[Read, Pieces]] = []
        missing = np.ones(count, bool)
        for read in planned.reads:
            if read.future is None and not read.level.device.holds(read.entries).all():
                continue  # released since
            if read.future is None:
                rows, sound = read.level.device.take(read.entries), np.ones(len(read.entries), bool)
            else:
                try:
                    rows, sound = read.future.result()
                except (CancelledError, OSError, ValueError):
                    continue
            self._stats.wrong += int((~sound).sum())
            if rows.lengths is not None and length is not None and (rows.lengths > length).any():
                fits = rows.lengths <= length  # longer than the sample is now: of other data
                rows, sound = rows.select(fits), _narrowed(sound, fits)
            doubtful = read.level.is_doubtful(read.entries[sound])
            if doubtful.any():
                kept = ~doubtful
                kept[doubtful] = self._are_of_their_samples(read, np.flatnonzero(sound)[doubtful], fields)
                rows, sound = rows.select(kept), _narrowed(sound, kept)
            if sound.any():
                missing[read.places[sound]] = False
                found.append((dataclasses.replace(read, places=read.places[sound], entries=read.entries[sound]), rows))
        return found, np.flatnonzero(missing)

    def _are_of_their_samples(self, read: Read, numbers: Rows, fields: tuple[bytes | None, ...] | None) -> list[bool]:
        """Whether some entries of a read, which an earlier run has written, are of the samples that were loaded."""
        if fields is None:
            return [False] * len(numbers)
        found = [read.level.holds_fields(int(read.entries[n]), fields[read.places[n]]) for n in numbers]
        if not all(found):
            self._stats.wrong += found.count(False)
            self._planner.forget_rows()
            for number in numbers[~np.array(found)]:
                read.level.drop_row(int(read.entries[number]))
        return found


def has_rows(loaded: Loaded, terms: Terms | None) -> bool:
    """Whether what the network is given of the batch has a row for each sample: a collate function may drop some."""
    if terms is None:
        return True
    shapes = [tuple(leaf.shape) for leaf in tensor_leaves(loaded.batch)]
    if loaded.input_shape is not None and terms.input_field is not None and shapes:
        shapes[terms.input_field.batch_leaf] = loaded.input_shape
    count = len(loaded.loaded)
    return all(one.leaf < len(shapes) and shapes[one.leaf][:1] == (count,) for one in terms.inputs)


def _length(loaded: Loaded, terms: Terms | None) -> int | None:
    """What the samples of the batch are padded to."""
    if terms is None or terms.length_batch_leaf is None:
        return None
    missing = loaded.input_shape is not None and terms.input_field is not None
    if missing and terms.input_field is not None and terms.input_field.batch_leaf == terms.length_batch_leaf:
        return loaded.input_shape[1] if loaded.input_shape is not None else None
    return list(tensor_leaves(loaded.batch))[terms.length_batch_leaf].shape[1]


def _narrowed(flags: Flags, kept: Flags) -> Flags:
    """Of the places that are set, leave those set that are ``kept``."""
    flags = flags.copy()
    flags[np.flatnonzero(flags)[~kept]] = False
    return flags


def _stand_in_batch(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, device: torch.device, marked: bool
) -> Tensor:
    """A stand-in for a batch, with memory of its own: what is done to its dimensions shows in their strides.

    Args:
        shape: of the batch.
        order: its dimensions from the slowest to the fastest in memory.
        dtype: of the batch.
        device: of the batch.
        marked: each sample has a value of its own, and each dimension: exchanging them shows in copies too.
    """
    made = stand_in_tensor(tuple(shape[dim] for dim in order), dtype, device).clone(
        memory_format=torch.contiguous_format
    )
    made = made.permute(sorted(range(len(order)), key=lambda dim: order[dim]))
    if marked and made.ndim > 1 and made.numel():
        count, step = len(made), made.stride(0)
        made.as_strided((count,), (step,)).copy_(torch.arange(count))
        for dim in range(1, made.ndim):
            if made.shape[dim] > 1:
                made.as_strided((count,), (step,), made.stride(dim)).fill_(dim)
    return made
