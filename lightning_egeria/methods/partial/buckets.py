"""Which gradients are exchanged together, among which ranks, and the bytes that this takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20  # as DDP's


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are exchanged at once.

    Attributes:
        parameters: of one dtype and device.
        contributors: ranks that compute the gradients, in order; never empty.
        size: number of ranks in the job.
    """

    parameters: tuple[nn.Parameter, ...]
    contributors: tuple[int, ...]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients on one rank."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @property
    def is_of_one(self) -> bool:
        """Whether one rank alone computes the gradients."""
        return len(self.contributors) == 1

    def empty(self) -> Tensor:
        """Return a tensor with room for all gradients in a row."""
        first = self.parameters[0]
        count = sum(parameter.numel() for parameter in self.parameters)
        return torch.empty(count, dtype=first.dtype, device=first.device)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks of the broadcast: the first contributor, which sends, and all that do not contribute."""
        rest = set(range(self.size)) - set(self.contributors)
        return tuple(sorted({self.contributors[0], *rest}))

    def received(self, rank: int) -> float:
        """Return the bytes that a rank receives: ``2 (k - 1) P / k`` as one of ``k`` contributors, else ``P``.

        All ranks together receive ``2 (k - 1) P + (n - k) P``, and as many bytes are sent.

        >>> weight = nn.Parameter(torch.zeros(6))
        >>> bucket = Bucket((weight,), contributors=(1, 2), size=3)
        >>> [bucket.received(rank) for rank in range(3)], bucket.receivers
        ([24.0, 24.0, 24.0], (0, 1))
        """
        return received_bytes(self.nbytes, len(self.contributors), rank in self.contributors)


def received_bytes(nbytes: int, contributors: int, contributes: bool) -> float:
    """Return the bytes that one rank receives to have the mean of a gradient.

    Args:
        nbytes: of the gradient.
        contributors: number of ranks that compute it.
        contributes: whether this rank does.
    """
    if not contributes:
        return float(nbytes) if contributors else 0.0
    return 2 * (contributors - 1) / contributors * nbytes


def contributors_of(depths: Sequence[int], index: int) -> tuple[int, ...]:
    """Return the ranks that compute the gradients of a layer module.

    Args:
        depths: number of layer modules in front of each rank's suffix.
        index: of the layer module; the length of the chain stands for all that is in no layer module.

    >>> contributors_of([0, 2, 1], 1)
    (0, 2)
    """
    return tuple(rank for rank, depth in enumerate(depths) if depth <= index)


def buckets_of(
    layers: Sequence[Sequence[nn.Parameter]], depths: Sequence[int], most_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Return the buckets of a step, in the order of its backward.

    Layer modules next to each other with the same contributors share a bucket, up to ``most_bytes``. A layer module
    without contributors has none.

    Args:
        layers: parameters of each layer module, front to back, and last of all that is in none.
        depths: number of layer modules in front of each rank's suffix.
        most_bytes: a layer module that exceeds it alone has a bucket of its own.
    """
    buckets: list[Bucket] = []
    for index in range(len(layers) - 1, -1, -1):
        contributors = contributors_of(depths, index)
        kinds: dict[object, list[nn.Parameter]] = {}
        for parameter in layers[index]:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in kinds.values() if contributors else ():
            bucket = Bucket(tuple(parameters), contributors, len(depths))
            before = buckets[-1] if buckets else None
            if before is not None and _fit(before, bucket, most_bytes):
                buckets[-1] = dataclasses.replace(before, parameters=(*before.parameters, *parameters))
            else:
                buckets.append(bucket)
    return tuple(buckets)


def _fit(one: Bucket, other: Bucket, most_bytes: int) -> bool:
    first, second = one.parameters[0], other.parameters[0]
    return (
        one.contributors == other.contributors
        and (first.dtype, first.device) == (second.dtype, second.device)
        and one.nbytes + other.nbytes <= most_bytes
    )
