"""The user's DataLoader, with a plan behind each batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_egeria.caching.loading import Loaded, Plan, PlannedDataset, as_it_is, is_own

# These draw random numbers before the first batch and behind the last: asking them ahead in between changes nothing.
_KNOWN_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
LOOK_AHEAD_BATCHES = 3


def gives_samples_once(loader: DataLoader[Any]) -> bool:
    """Whether no sample comes twice in an epoch, as far as the sampler is known."""
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    if type(sampler) is SubsetRandomSampler:
        return len(set(sampler.indices)) == len(sampler.indices)
    return type(sampler) in (SequentialSampler, DistributedSampler)


class _PlannedSampler:
    """The user's batch sampler; yields plans instead of lists of ids. Other attributes are those of the user's."""

    def __init__(self, batch_sampler: Any, plan: Callable[[list[int]], Plan], look_ahead: Callable[[], int]) -> None:
        self._plan = plan
        self._look_ahead = look_ahead
        self._batch_sampler = batch_sampler  # last, see `is_own`

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_batch_sampler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._batch_sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if is_own(self, name, "_batch_sampler"):
            super().__setattr__(name, value)
        else:
            setattr(self._batch_sampler, name, value)

    def __iter__(self) -> Iterator[Plan]:
        ahead: deque[Plan] = deque()
        batches = iter(self._batch_sampler)
        asked, count = 0, len(self._batch_sampler)
        while True:
            # The one that is wanted now, and some further ones, but not the last.
            while not ahead or (len(ahead) <= self._look_ahead() and asked < count - 1):
                ids = next(batches, None)
                if ids is None:
                    yield from ahead
                    return
                asked += 1
                ahead.append(self._plan(list(ids)))
            yield ahead.popleft()


class PlannedLoader(DataLoader[Any]):
    """Iterates over the same batches as the user's DataLoader. Reads of other attributes go to that one.

    Args:
        loader: the user's; `why_not` must have found nothing against it.
        dataset: its dataset and collate function.
        plan: makes the plan of a batch from its sample ids.
        receive: makes of what was loaded, and the seconds waited for it, the user's batch.
        begin: called before each pass over the data.
        active: whether plans do anything yet.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dataset: PlannedDataset,
        plan: Callable[[list[int]], Plan],
        receive: Callable[[Loaded, float], Any],
        begin: Callable[[], None],
        active: Callable[[], bool],
    ) -> None:
        plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in _KNOWN_SAMPLERS
        depth = LOOK_AHEAD_BATCHES if plain and loader.num_workers == 0 else 0
        options: dict[str, Any] = {"in_order": loader.in_order} if hasattr(loader, "in_order") else {}
        sampler = _PlannedSampler(loader.batch_sampler, plan, lambda: depth if active() else 0)
        super().__init__(
            dataset,  # type: ignore[arg-type]  # it only ever is asked for planned batches
            batch_sampler=sampler,  # type: ignore[arg-type]  # it gives plans instead of lists of ids
            collate_fn=as_it_is,  # type: ignore[arg-type]  # what is loaded is a batch already
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            **options,
        )
        # What somebody may want to know is what the user has said; DataLoader lets nobody set it.
        vars(self).update(sampler=loader.sampler, batch_size=loader.batch_size, drop_last=loader.drop_last)
        self.loader = loader
        self._receive = receive
        self._begin = begin

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        self._begin()
        # At once, as the user's does: it draws a random number and starts the workers.
        return self._batches(super().__iter__())

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            try:
                loaded = next(iterator)
            except StopIteration:
                return
            yield self._receive(loaded, time.perf_counter() - started)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being made or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


def why_not(loader: Any) -> str | None:
    """What speaks against planning the batches of a training DataLoader; None: nothing."""
    if not isinstance(loader, DataLoader):
        return f"the training data come from a {type(loader).__name__}, and not from one torch DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__ or type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"{type(loader).__name__} has its own way of going through the data"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no sample ids"
    if loader.batch_sampler is None:
        return "the DataLoader makes no batches (batch_size=None), so samples have no ids"
    if not hasattr(loader.dataset, "__len__"):
        return f"the dataset {type(loader.dataset).__name__} has no length"
    try:
        len(loader)
    except TypeError:
        return "the DataLoader has no length"
    return None
