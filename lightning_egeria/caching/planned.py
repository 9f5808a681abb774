"""The user's DataLoader, with a plan behind each batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_egeria.caching.loading import Loaded, Plan, PlannedDataset, as_it_is

# These draw random numbers before the first batch and behind the last: asking them ahead in between changes nothing.
_KNOWN_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
LOOK_AHEAD_BATCHES = 3


class _PlannedSampler:
    """The user's batch sampler; yields plans instead of lists of ids."""

    def __init__(self, batch_sampler: Any, plan: Callable[[list[int]], Plan], look_ahead: Callable[[], int]) -> None:
        self._batch_sampler = batch_sampler
        self._plan = plan
        self._look_ahead = look_ahead

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


class PlannedLoader:
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
        self.loader = loader
        self._receive = receive
        self._begin = begin
        plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in _KNOWN_SAMPLERS
        depth = LOOK_AHEAD_BATCHES if plain and loader.num_workers == 0 else 0
        sampler = _PlannedSampler(loader.batch_sampler or (), plan, lambda: depth if active() else 0)
        options: dict[str, Any] = {"in_order": loader.in_order} if hasattr(loader, "in_order") else {}
        self._planned: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # it only ever is asked for planned batches
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=as_it_is,  # type: ignore[arg-type]
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

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        # At once, as the user's does: it draws a random number and starts the workers.
        return self._batches(iter(self._planned))

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            try:
                loaded = next(iterator)
            except StopIteration:
                return
            yield self._receive(loaded, time.perf_counter() - started)

    @property
    def _iterator(self) -> Any:
        """Lightning ends the workers by it."""
        return self._planned._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._planned._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_planned"):  # while it is being unpickled
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
