"""Which batch size comes next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from lightning_egeria.cluster.goodput import BatchLimits, Goodput
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.errors import ArgumentError

LEAST_GAIN = 1.05  # in goodput, for a change


@dataclasses.dataclass(frozen=True)
class Division:
    """A batch size, and how a step comes to it.

    Attributes:
        local: samples in a batch of one process.
        batches: batches of each process in an optimizer step.
        replicas: number of processes.
    """

    local: int
    batches: int
    replicas: int

    @property
    def total(self) -> int:
        """Samples in an optimizer step."""
        return self.local * self.batches * self.replicas


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one division is expected to reach.

    Attributes:
        throughput: samples a second.
        efficiency: what a sample teaches, relative to the initial batch size.
    """

    throughput: float
    efficiency: float

    @property
    def goodput(self) -> float:
        """Samples a second that teach as much as at the initial batch size."""
        return self.throughput * self.efficiency


class BatchSizeRule:
    """Chooses the next batch size.

    Attributes:
        measures: whether the rule goes by what was measured on rank 0. The others are the same on all ranks, and asked
            after every step.
    """

    measures: bool

    def check(self, initial: int) -> None:
        """Compare the rule with the initial batch size. Does nothing by default."""

    def next(
        self, step: int, now: Division, nodes: int, limits: BatchLimits, goodput: Callable[[], Goodput | None]
    ) -> Division | None:
        """Return another division; None to stay.

        Args:
            step: number of optimizer steps so far.
            now: the present one.
            nodes: number of nodes.
            limits: on the batch size.
            goodput: returns that of the job; None before it is known.
        """
        raise NotImplementedError


class LargestGoodput(BatchSizeRule):
    """Changes to the batch size of the largest goodput, where that is at least 5 % above the present one's.

    Of 50 batch sizes in geometric steps from the initial to the largest, with accumulation where memory ends.
    """

    measures = True

    def next(
        self, step: int, now: Division, nodes: int, limits: BatchLimits, goodput: Callable[[], Goodput | None]
    ) -> Division | None:
        """Return another division; None to stay."""
        known = goodput()
        if known is None:
            return None
        best, local, accumulation = known.best(nodes, now.replicas)
        if best < LEAST_GAIN * estimate(known, now, nodes).goodput or local < 1:
            return None
        return Division(local, accumulation + 1, now.replicas)


class ScriptedBatchSizes(BatchSizeRule):
    """Batch sizes by step, for comparisons.

    Args:
        schedule: batch size of all processes by the number of optimizer steps from which on it holds.
        largest: the largest batch size.

    Raises:
        ArgumentError: if a step or size is out of range.
    """

    measures = False

    def __init__(self, schedule: Mapping[int, int], largest: int) -> None:
        if not isinstance(schedule, Mapping):
            raise ArgumentError(f"batch_sizes must map steps to batch sizes, as in {{100: 64}}, got {schedule!r}")
        for step, size in schedule.items():
            if type(step) is not int or type(size) is not int or step < 0 or not 1 <= size <= largest:
                raise ArgumentError(
                    f"batch_sizes must map steps to batch sizes up to max_batch_size, {largest}; got {step!r}: {size!r}"
                )
        self.schedule = dict(sorted(schedule.items()))

    def check(self, initial: int) -> None:
        """Check that no batch size is below the initial one.

        Raises:
            ArgumentError: if one is.
        """
        for step, size in self.schedule.items():
            if size < initial:
                raise ArgumentError(f"batch_sizes must be at least {initial}, the initial one; got {step}: {size}")

    def next(
        self, step: int, now: Division, nodes: int, limits: BatchLimits, goodput: Callable[[], Goodput | None]
    ) -> Division | None:
        """Return another division; None to stay."""
        sizes = [size for start, size in self.schedule.items() if start <= step]
        if not sizes:
            return None
        local = math.ceil(min(sizes[-1], limits.largest) / now.replicas)
        batches = math.ceil(local / limits.largest_local)
        local = limits.bounded(math.ceil(local / batches), batches - 1, now.replicas)
        found = Division(local, batches, now.replicas)
        return found if found != now else None


def estimate(goodput: Goodput, division: Division, nodes: int) -> Estimate:
    """Return what a division is expected to reach."""
    model: ThroughputModel = goodput.throughput
    seconds = model.step_seconds(nodes, division.replicas, division.local)
    seconds = seconds + (division.batches - 1) * model.gradient_seconds(division.local)
    efficiency = goodput.efficiency(np.array([float(division.total)]))[0]
    return Estimate(division.total / float(seconds), float(efficiency))


def limits_of(
    initial: int,
    largest: int,
    smallest_local: int,
    largest_local: int | None,
    replicas: int,
    fewest_batches: int = 1,
) -> BatchLimits:
    """Return the limits on the batch size.

    Args:
        initial: the initial batch size.
        largest: the largest.
        smallest_local: smallest batch of one process.
        largest_local: largest batch of one process; None has no limit but ``largest``.
        replicas: number of processes.
        fewest_batches: in a step of one process above the initial batch size.

    Raises:
        ArgumentError: if no batch size is left for this number of processes.
    """
    least = max(initial, smallest_local * replicas)
    if largest < least:
        raise ArgumentError(
            f"max_batch_size must be at least {least}, the initial batch size, and {smallest_local} samples in each of "
            f"{replicas} processes; got {largest}"
        )
    local = min(largest if largest_local is None else largest_local, -(-largest // replicas))
    return BatchLimits(initial, largest, smallest_local, max(local, smallest_local), fewest_batches)
