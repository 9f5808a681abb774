"""Goodput: how much a second of training teaches, for any number of devices and any batch size.

Qiao et al., OSDI 2021: goodput is throughput times statistical efficiency, in samples a second that teach as much as at
the initial batch size.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_egeria.cluster.throughput import ThroughputModel

BATCH_SIZES = 50  # tried between the smallest and the largest, in geometric steps
_SLACK = 1e-8  # so that rounding errors do not round up


def gain(squared_norm: ArrayLike, variance: ArrayLike, scale: ArrayLike) -> NDArray[np.float64]:
    """Return how many steps at the initial batch size a step at ``scale`` times that size is worth.

    ``(variance + squared_norm) / (variance / scale + squared_norm)`` of AdaScale (Johnson et al., arXiv:2007.05105):
    1 at scale 1, and never above ``scale``. 1 also where both are 0.

    Args:
        squared_norm: of the gradient at the initial batch size, without its noise.
        variance: of that gradient.
        scale: batch size, as a multiple of the initial one.

    >>> float(gain(1.0, 4.0, 2.0))
    1.6666666666666667
    """
    noise = np.asarray(np.divide(variance, scale) + squared_norm, float)
    worth: NDArray[np.float64] = np.ones_like(noise)
    np.divide(np.add(variance, squared_norm), noise, out=worth, where=noise > 0)
    return worth


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """Which batch sizes a job may use.

    Attributes:
        initial: total batch size that its settings were made for; the smallest.
        largest: total batch size.
        smallest_local: on one device.
        largest_local: that fits in the memory of a device.
        fewest_batches: in a step of one replica above the initial batch size. The noise of a gradient shows in several
            gradients of a step only; 1 if the job repeats a step in parts now and then.
    """

    initial: int
    largest: int
    smallest_local: int
    largest_local: int
    fewest_batches: int = 2

    @property
    def most_replicas(self) -> int:
        """Devices that the largest batch can be shared among."""
        return max(1, self.largest // self.smallest_local)

    def split(self, batch_size: float, replicas: int) -> tuple[int, int]:
        """Return local batch size and accumulation steps for a total batch size.

        >>> BatchLimits(128, 4096, 32, 1024).split(4096, 2)
        (1024, 1)
        """
        local = math.ceil(batch_size / replicas - _SLACK)
        accumulation = math.ceil(local / self.largest_local - _SLACK) - 1
        if replicas == 1 and batch_size > self.initial:
            accumulation = max(self.fewest_batches - 1, accumulation)
        local = math.ceil(local / (accumulation + 1) - _SLACK)
        return self.bounded(local, accumulation, replicas), accumulation

    def bounded(self, local: int, accumulation: int, replicas: int) -> int:
        """Return the local batch size, reduced so that the total is not above the largest."""
        return min(local, self.largest // (replicas * (accumulation + 1)))


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Goodput of one job, from its fitted throughput and the noise of its gradients.

    Attributes:
        throughput: of its steps.
        squared_norm: of a gradient at the initial batch size.
        variance: of a gradient at the initial batch size.
        limits: on the batch size.
    """

    throughput: ThroughputModel
    squared_norm: float
    variance: float
    limits: BatchLimits

    def efficiency(self, batch_size: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what a sample teaches, relative to the initial batch size: 1 there, less above."""
        scale = batch_size / self.limits.initial
        return gain(self.squared_norm, self.variance, scale) / scale

    def goodput(self, nodes: int, replicas: int) -> float:
        """Return the goodput at the best batch size."""
        return self.best(nodes, replicas)[0]

    def best(self, nodes: int, replicas: int) -> tuple[float, int, int]:
        """Return the highest goodput, and the local batch size and accumulation steps that reach it."""
        goodput, local, accumulation = self._best(np.array([nodes]), np.array([replicas]))
        return float(goodput[0]), int(local[0]), int(accumulation[0])

    def goodputs(self, on_one: int, on_several: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the goodput of 0, 1, 2, ... replicas.

        Args:
            on_one: most replicas on one node, at least 1.
            on_several: most replicas on more than one node, at least 1.

        Returns:
            The goodputs on one node, of shape ``(on_one + 1,)``, and on several, of shape ``(on_several + 1,)``.
            Several nodes need two replicas; with less, goodput is 0.
        """
        replicas = np.concatenate([np.arange(1, on_one + 1), np.arange(2, on_several + 1)])
        goodput, _, _ = self._best(np.repeat([1, 2], [on_one, on_several - 1]), replicas)
        return np.concatenate([[0.0], goodput[:on_one]]), np.concatenate([[0.0, 0.0], goodput[on_one:]])

    def _best(
        self, nodes: NDArray[np.int64], replicas: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """As `best`, for arrays of configurations."""
        limits = self.limits
        smallest = np.maximum(limits.initial, limits.smallest_local * replicas)
        share = np.linspace(0, 1, BATCH_SIZES)[:, None]
        total = np.exp(np.log(smallest) * (1 - share) + np.log(limits.largest) * share)
        total[0], total[-1] = smallest, limits.largest
        local = total / replicas
        accumulation = np.ceil(local / limits.largest_local - _SLACK) - 1
        single = (replicas == 1) & (local > limits.initial + _SLACK)
        accumulation = np.where(single, np.maximum(accumulation, limits.fewest_batches - 1), accumulation)
        local = np.ceil(local / (accumulation + 1) - _SLACK)
        local = np.minimum(local, limits.largest // (replicas * (accumulation + 1)))  # `bounded`
        total = np.maximum(replicas * local * (accumulation + 1), 1)  # of none, the goodput is 0 below
        seconds = self.throughput.step_seconds(nodes, replicas, local)
        seconds += accumulation * self.throughput.gradient_seconds(local)
        goodput = total / seconds * self.efficiency(total)
        goodput[(local < limits.smallest_local) | (local > limits.largest_local)] = 0.0
        best = np.argmax(goodput, axis=0), np.arange(goodput.shape[1])
        return goodput[best], local[best].astype(int), accumulation[best].astype(int)
