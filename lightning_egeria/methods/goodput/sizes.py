"""The batch sizes that a run may have, and where it begins or resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from lightning_egeria.core.training.checkpoints import checkpoint_read
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.goodput.changing import PlannedChange, planned_of
from lightning_egeria.methods.goodput.decision import Division, limits_of

Local = tuple[int, int | None]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The batch sizes of a run.

    Attributes:
        initial: that of the first run.
        largest: the largest: no more than the samples of an epoch.
        local: smallest and largest batch of one process; None for the largest has no limit.
        now: the first of this run.
        planned: the change on its way; None without one.
        done: number of batches that were trained in an epoch that is resumed.
    """

    initial: int
    largest: int
    local: Local
    now: Division
    planned: PlannedChange | None = None
    done: int = 0


def are_limits(sizes: object) -> bool:
    """Whether an argument is the smallest and the largest batch of one process.

    >>> [are_limits(sizes) for sizes in ((4, 8), [4, None], (8, 4), 8)]
    [True, True, False, False]
    """
    if not isinstance(sizes, Sequence) or len(sizes) != 2 or type(sizes[0]) is not int or sizes[0] < 1:
        return False
    return sizes[1] is None or (type(sizes[1]) is int and sizes[1] >= sizes[0])


def first_sizes(
    trainer: Any,
    adapted: AdaptedLoader,
    state: Mapping[str, Any] | None,
    largest: int,
    local: Local | None,
    notices: Notices,
) -> Sizes:
    """Return the batch sizes of a run, and let the loader begin with the first.

    Args:
        trainer: the Trainer, before it trains.
        adapted: the training data.
        state: that of a resumed run; None without one.
        largest: the largest that the user allows.
        local: smallest and largest batch of one process; None finds them.
        notices: takes log lines and warnings.

    Raises:
        ArgumentError: if the loader's batches are not within these limits.
        CheckpointError: if the state is damaged.
    """
    batches, replicas = adapted.batches, trainer.world_size
    now = Division(batches.initial_batch_size, trainer.accumulate_grad_batches, replicas)
    initial = now.total
    if state is not None:
        with checkpoint_read("goodput"):
            initial = int(state["initial"])
            now = Division(*(int(state["now"][name]) for name in ("local", "batches", "replicas")))
    local = _local_limits(batches.initial_batch_size, local, largest // replicas)
    most = min(largest, max(initial, adapted.samples))
    if most < largest:
        notices.inform(f"an epoch has {adapted.samples} samples, and no batch has more")
    limits = limits_of(initial, most, *local, replicas)
    if state is None:
        done = _batches_begun(trainer)
        if done:
            notices.warn(
                "the checkpoint was written in the middle of an epoch without AdaptiveBatchSize. The epoch begins again"
            )
            adapted.begin_again(done)
        return Sizes(initial, most, local, now, done=done)
    if now.replicas != replicas or not _within(now, limits):
        # No process begins with larger batches than it had: those were not tried in its memory.
        local_before = max(now.local, batches.initial_batch_size)
        tried = dataclasses.replace(limits, largest_local=min(limits.largest_local, local_before))
        divided, accumulation = tried.split(max(now.total, initial), replicas)
        now = Division(divided, accumulation + 1, replicas)
    # A caller that asks before training starts gets the number of batches at the initial batch size.
    batches.announced = -(-adapted.samples // initial) * trainer.accumulate_grad_batches
    batches.change(now.local)
    with checkpoint_read("goodput"):
        adapted.resume(state)
        planned, done = planned_of(state["planned"]), int(state["done"])
        within = state["place"] is not None and not state["place"]["over"]
    if planned is not None and (planned.division.replicas != replicas or not _within(planned.division, limits)):
        planned = None
    if planned is not None:
        batches.change(planned.division.local, planned.at if within else 0)
    return Sizes(initial, most, local, now, planned, done)


def _local_limits(own: int, given: Local | None, most: int) -> Local:
    if given is None:
        return max(1, min(-(-own // 2), most)), None
    smallest, largest = given
    if not smallest <= own <= (largest or own):
        raise ArgumentError(
            f"the batches of the DataLoader have {own} samples, expected a size within local_batch_sizes, "
            f"{given}. Change one of the two"
        )
    return smallest, largest


def _within(division: Division, limits: BatchLimits) -> bool:
    return division.total <= limits.largest and division.local <= limits.largest_local


def _batches_begun(trainer: Any) -> int:
    """Return the number of batches of an epoch that a checkpoint has left in its middle; 0 without one."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if not trainer.fit_loop.restarting or progress.is_last_batch:
        return 0
    return int(progress.current.processed)
