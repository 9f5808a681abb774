"""The training DataLoader with batches of a size that changes, and its place in an epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import BatchSampler, DataLoader

from lightning_egeria.core.batches.batch_sampler import MutableBatchSampler
from lightning_egeria.core.batches.reading import copy_of, why_no_ids
from lightning_egeria.core.snapshots.random_state import LoadingState
from lightning_egeria.core.training.loops import set_epoch_length
from lightning_egeria.core.training.order import EpochOrder, digest_of, share_of
from lightning_egeria.errors import TrainingDataError
from lightning_egeria.upstream.lightning import prepared

_INSTEAD = (
    "A batch size that changes needs one torch DataLoader with batches of a map-style dataset. Let other data "
    "modules wrap: FrozenPrefixCache(AdaptiveBatchSize(...))"
)


@dataclasses.dataclass
class _Place:
    """Where an epoch is.

    Attributes:
        order: how its samples came into their order.
        skipped: ids that it had used up with other numbers of processes.
        batches: batches that it had then.
        replicas: number of processes since.
        share: ids of this process since.
    """

    order: EpochOrder
    skipped: int
    batches: int
    replicas: int
    share: list[Any] | None = None  # None: the sampler yields them


class AdaptedLoader:
    """The user's DataLoader with a `MutableBatchSampler`, and the state that a checkpoint needs of it.

    It goes on from the ids of an epoch. `ResumableCheckpoints` and selection load the batches before their place again,
    but another number of processes has no such batches. So random numbers that workers draw for samples are others
    behind a resume.

    Args:
        loader: the user's.
        trainer: the Trainer.
        tell: takes a warning.

    Attributes:
        loader: the loader to give to Lightning: a copy.
        batches: its batch sampler.
        samples: samples of an epoch in all processes.

    Raises:
        TrainingDataError: if the size of its batches cannot change.
    """

    def __init__(self, loader: Any, trainer: pl.Trainer, tell: Callable[[str], None]) -> None:
        reason = why_no_ids(loader)
        if reason is not None:
            raise TrainingDataError(f"{reason}. {_INSTEAD}")
        self._trainer, self._tell = trainer, tell
        self._rank, self._replicas = trainer.global_rank, trainer.world_size
        own = loader.batch_sampler
        self._joined = type(own) is not BatchSampler
        self._sampler = own if self._joined else own.sampler  # not the DataLoader's, if it was given a batch sampler
        shared = prepared(trainer, loader)
        self.batches = MutableBatchSampler.like(shared.batch_sampler, started=self._begin)
        # Lightning resumes in the middle of an epoch without a warning if the loader has state. Ours is `state`.
        self.loader: DataLoader[Any] = copy_of(
            shared, batch_sampler=self.batches, state_dict=dict, load_state_dict=_ignored
        )
        self._place: _Place | None = None
        self._resumed: _Place | None = None
        self._generators: LoadingState | None = None
        self._over = 0  # batches of an epoch that was over at the checkpoint
        limit, whole = trainer.limit_train_batches or 0, len(self.batches)
        most = min(limit if isinstance(limit, int) else int(whole * limit), whole)
        if most < whole:
            self.batches.most_samples = most * self.batches.initial_batch_size
        self.samples = self._count() * self._replicas

    def state(self, batches: int, begun: bool = False) -> dict[str, Any]:
        """Return the place in the epoch, and the generators that the sampler draws from, in plain types.

        Args:
            batches: number of batches in this epoch that training is done with.
            begun: whether batches that were read ahead of training count: an epoch has begun with them.

        Returns:
            With ``"place"``, which is None before the first batch of an epoch, and without a batch.
        """
        generators = LoadingState.current([self._sampler]).to_plain()
        return {"place": self._place_behind(batches, begun), "generators": generators}

    def _place_behind(self, batches: int, begun: bool) -> dict[str, Any] | None:
        place = self._place
        if place is None or (batches <= 0 and not (begun and self.batches.drawn)):
            return None
        sizes = [self.batches.size_of(number) for number in range(place.batches, batches)]
        used = sum(sizes)
        whole = self._share(place, 0) if place.share is None or self._rank else place.share
        return {
            "order": place.order.state(),
            "skipped": place.skipped,
            "batches": place.batches,
            "replicas": place.replicas,
            "sizes": sizes,
            "digest": digest_of(whole[:used]),
            "over": batches >= len(self.batches),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch continue from the place of a `state`, with this number of processes.

        If the sampler does not repeat its order, a warning says so, and the epoch begins again.
        """
        now, left = LoadingState.from_plain(state["generators"]), state["place"]
        if left is None or left["over"]:
            now.restore_held([self._sampler])
            self._over = left["batches"] + len(left["sizes"]) if left is not None else 0
            return
        self._generators = now
        sizes = [int(size) for size in left["sizes"]]
        skipped, batches, replicas = (int(left[name]) for name in ("skipped", "batches", "replicas"))
        place = _Place(EpochOrder.from_state(left["order"]), skipped, batches, replicas)
        if digest_of(self._share(place, 0)[: sum(sizes)]) != left["digest"] or (self._joined and replicas > 1):
            self._tell(
                f"the order of {type(self._sampler).__name__} cannot be repeated, so the epoch of the checkpoint "
                "begins again. A sampler repeats it if it draws from global random numbers, or from a generator in its "
                "attributes"
            )
            self.begin_again(batches + len(sizes))
            return
        if replicas != self._replicas:
            used = skipped + sum(sizes) * replicas
            place = _Place(place.order, used, batches + len(sizes), self._replicas)
            sizes = []
        if place.share is None:
            place.share = self._share(place, self._rank)
        self._go_on(place, place.share, sizes)

    def begin_training(self) -> bool:
        """Training begins, maybe within an epoch; return whether that was over at the checkpoint, and ends now."""
        over, self._over = self._over, 0
        set_epoch_length(self._trainer, over or len(self.batches))
        return over > 0

    def begin_epoch(self) -> None:
        """An epoch begins; not one that is resumed."""
        self.batches.forget_resumed()
        set_epoch_length(self._trainer, self.batches.full_length)

    def tell_length(self) -> None:
        """Tell the Trainer how many batches the epoch has; at a batch too: Lightning resumes without a beginning."""
        set_epoch_length(self._trainer, len(self.batches))

    def begin_again(self, batches: int) -> None:
        """Let the next epoch be a whole one, although it continues from batch ``batches`` of one that was left."""
        place = _Place(EpochOrder.now(self.loader, self._sampler), 0, batches, self._replicas)
        again: Any = iter(self.batches.sampler)
        place.share = list(itertools.chain.from_iterable(again) if self._joined else again)
        self.batches.resume(place.share, [0] * batches)
        self._resumed = place

    def restart(self, sizes: Sequence[int]) -> None:
        """Let the next time through the loader be this epoch again, behind batches of other sizes.

        Args:
            sizes: samples in each batch that training is done with.

        Raises:
            TrainingDataError: if the sampler does not repeat its order.
        """
        place = self._place
        assert place is not None  # an epoch has begun
        self._go_on(place, self.order(), sizes[place.batches :])

    @contextlib.contextmanager
    def preserved_generators(self) -> Iterator[None]:
        """Let generators of loader and sampler, and the random state, be what they are when the body ends."""
        loaders = [self._sampler, self.loader]
        state = LoadingState.current(loaders)
        try:
            yield
        finally:
            state.restore(loaders)

    def order(self) -> list[Any]:
        """Return the ids of this process in the epoch in progress, the ones so far included.

        Raises:
            TrainingDataError: if the sampler does not repeat its order.
        """
        place = self._place
        assert place is not None  # an epoch has begun
        order = self._share(place, self._rank) if place.share is None else place.share
        if order[: len(self.batches.ids)] != self.batches.ids:
            raise TrainingDataError(
                f"the order of {type(self._sampler).__name__} cannot be repeated, so the size of its batches cannot "
                "change within an epoch. A sampler repeats it if it draws from global random numbers when an epoch "
                "begins, or from a generator in its attributes"
            )
        place.share = order
        return order

    def _begin(self) -> None:
        """An epoch begins, before the sampler draws."""
        self._place, self._resumed = self._resumed, None
        if self._generators is not None:  # they may have drawn since, for the workers
            self._generators.restore_held([self._sampler])
        self._generators = None
        if self._place is None:
            self._place = _Place(EpochOrder.now(self.loader, self._sampler), 0, 0, self._replicas)

    def _go_on(self, place: _Place, share: Sequence[Any], sizes: Sequence[int]) -> None:
        after = place.order.after(self._sampler)
        self.batches.resume(share, [0] * place.batches + list(sizes), lambda: after.restore_held([self._sampler]))
        self._resumed = place

    def _share(self, place: _Place, rank: int) -> list[Any]:
        ids = place.order.ids(self._sampler, self._joined)
        return share_of(ids[place.skipped :], rank, place.replicas)

    def _count(self) -> int:
        batches = self.batches
        whole = len(batches.sampler) * (batches.initial_batch_size if self._joined else 1)
        return whole if batches.most_samples is None else min(whole, batches.most_samples)


def _ignored(state: Any) -> None:
    """Take the place of a loader's ``load_state_dict``."""
