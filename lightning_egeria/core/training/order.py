"""The order of the samples of an epoch, to be repeated later and by another number of processes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_egeria.core.snapshots.random_state import LoadingState


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """How the samples of one epoch came into their order.

    Samplers draw from global random numbers when an epoch begins, or from a generator that they hold, or shuffle by the
    epoch that ``set_epoch`` names. A `DistributedSampler` shuffles by seed and epoch, and deals the order out to
    the processes in turn.

    Attributes:
        samples: number of samples of the sampler of one process alone.
        seed: of the shuffle of a `DistributedSampler`; None where there is none.
        replicas: number of processes.
        sampled: whether the user's own sampler orders the samples, and not their number.
        begun: state of all that the sampler draws from, before it drew.
        epoch: the ``epoch`` that a sampler with ``set_epoch`` shuffled by; None without one.
    """

    samples: int
    seed: int | None
    replicas: int
    sampled: bool
    begun: LoadingState
    epoch: int | None = None

    @classmethod
    def now(cls, loader: DataLoader[Any], sampler: Any) -> EpochOrder:
        """Return the order that the next epoch of a loader will have.

        Args:
            loader: of this process, maybe with a `DistributedSampler`.
            sampler: the user's own sampler or batch sampler.
        """
        dealing = loader.sampler if isinstance(loader.sampler, DistributedSampler) else None
        data: Any = loader.dataset
        sampled = dealing is None or dealing.dataset is not data
        return cls(
            len(sampler) if sampled else len(data),
            dealing.seed + dealing.epoch if dealing is not None and dealing.shuffle else None,
            dealing.num_replicas if dealing is not None else 1,
            sampled,
            LoadingState.current([sampler]),
            epoch if type(epoch := getattr(_by_epoch(sampler), "epoch", None)) is int else None,
        )

    def ids(self, sampler: Any, yields_batches: bool = False) -> list[Any]:
        """Return the ids of all samples in the order of the epoch. Random numbers stay as they are.

        Args:
            sampler: the user's own sampler or batch sampler, as that of `now`.
            yields_batches: whether it yields lists of ids.
        """
        order: list[Any] = self._sampled(sampler)[0] if self.sampled else list(range(self.samples))
        if yields_batches:
            order = list(itertools.chain.from_iterable(order))
        if self.seed is not None:
            places = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed))
            order = [order[place] for place in places.tolist()]
        return order

    def state(self) -> dict[str, Any]:
        """Return the fields, in plain types."""
        return {**vars(self), "begun": self.begun.to_plain()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EpochOrder:
        """Return the order from its `state`."""
        return cls(**{**state, "begun": LoadingState.from_plain(state["begun"])})

    def after(self, sampler: Any) -> LoadingState:
        """Return the state behind the last id of the epoch."""
        return self._sampled(sampler)[1] if self.sampled else self.begun

    def _sampled(self, sampler: Any) -> tuple[list[Any], LoadingState]:
        before = LoadingState.current([sampler])
        try:
            self.begun.restore([sampler])
            if self.epoch is not None:
                _by_epoch(sampler).set_epoch(self.epoch)
            return list(iter(sampler)), LoadingState.current([sampler])
        finally:
            before.restore([sampler])


def _by_epoch(sampler: Any) -> Any:
    """Return the sampler with ``set_epoch``: the given one, or the one inside a batch sampler; None without one."""
    for one in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(one, "set_epoch", None)):
            return one
    return None


def share_of(order: Sequence[Any], rank: int, replicas: int) -> list[Any]:
    """Return the ids of one process: each ``replicas``-th, and as many as the others have.

    As `DistributedSampler` does, the first ids come again at the end where the number does not divide.

    >>> share_of([5, 6, 7, 8, 9], rank=1, replicas=2)
    [6, 8, 5]
    """
    missing = -len(order) % replicas
    return list(itertools.islice(itertools.chain(order, itertools.cycle(order)), rank, len(order) + missing, replicas))


def digest_of(ids: Iterable[Any]) -> str:
    """Return a short digest of ids in their order.

    >>> digest_of([1, 2]) == digest_of(torch.tensor([1, 2]).tolist()), digest_of([1, 2]) == digest_of([2, 1])
    (True, False)
    """
    hashed = hashlib.blake2b(digest_size=8)
    for one in ids:
        hashed.update(repr(one).encode() + b",")
    return hashed.hexdigest()


def draws_at_once(loader: DataLoader[Any]) -> bool:
    """Whether the sampler draws random numbers before the first batch and behind the last, as far as it is known.

    >>> draws_at_once(DataLoader([1, 2], shuffle=True)), draws_at_once(DataLoader([1, 2], sampler=iter([1, 0])))
    (True, False)
    """
    sampler = loader.sampler
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples > len(sampler.data_source)):
        return False  # it draws some of them at a time
    known = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return type(loader.batch_sampler) is BatchSampler and type(sampler) in known


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether a loader of torch's own samplers has other batches in each epoch.

    >>> data = [0, 1, 2]
    >>> is_shuffled(DataLoader(data, shuffle=True)), is_shuffled(DataLoader(data))
    (True, False)
    """
    sampler: Any = loader.sampler
    return type(sampler) is RandomSampler or (isinstance(sampler, DistributedSampler) and sampler.shuffle)


def has_samples_once(loader: DataLoader[Any]) -> bool:
    """Whether no sample comes twice in an epoch, as far as the sampler is known.

    >>> has_samples_once(DataLoader([1, 2], shuffle=True)), has_samples_once(DataLoader([1, 2], sampler=[1, 1]))
    (True, False)
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    if type(sampler) is SubsetRandomSampler:
        return len(set(sampler.indices)) == len(sampler.indices)
    return type(sampler) in (SequentialSampler, DistributedSampler)
