"""One more worker process of a DataLoader, which loads on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_egeria.batches.reading import stop_workers
from lightning_egeria.snapshots.random_state import preserved_random_state


class SpareWorker:
    """Loads on request, in a process that starts now, as the workers of an iterator do that is made now.

    So it has the dataset as they have it, also after the training process has changed its own. No random number of
    this process moves.

    Args:
        loader: the DataLoader; the process is set up as its workers are.
        dataset: answers requests.
        worker_init_fn: called at the start of the process, with 0.

    >>> loader = DataLoader(range(4), num_workers=1)
    >>> spare = SpareWorker(loader, Requests(loader.dataset, lambda place, step: place + step), None)
    >>> spare.load(1, 0.5), spare.load(2, 0.5)
    (1.5, 2.5)
    >>> spare.close()
    """

    def __init__(
        self, loader: DataLoader[Any], dataset: Requests, worker_init_fn: Callable[[int], None] | None
    ) -> None:
        self._number = 0
        self._request: tuple[int, Any] | None = None
        with preserved_random_state():
            worker: DataLoader[Any] = DataLoader(
                dataset,  # type: ignore[arg-type]  # it is asked for requests instead of indices
                batch_sampler=self._requests(),  # type: ignore[arg-type]  # as they come
                collate_fn=_as_it_is,
                num_workers=1,
                prefetch_factor=1,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                generator=torch.Generator(),
            )
            self._answers = iter(worker)

    def load(self, *request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            Exception: what loading raised, or the start of the process.
        """
        self._number += 1
        self._request = self._number, request
        try:
            next(self._answers)  # to no request; meanwhile it gets this one
        finally:
            self._request = None
        answered, answer = next(self._answers)
        while answered != self._number:  # an earlier one was interrupted
            answered, answer = next(self._answers)
        return answer

    def close(self) -> None:
        """Stop the process. Safe to call twice."""
        stop_workers(self._answers)

    def _requests(self) -> Iterator[tuple[int, Any] | None]:
        """What the process gets, each time that it has answered."""
        while True:
            yield self._request


class Requests:
    """A dataset that answers requests.

    Args:
        dataset: the user's, for ``worker_init_fn``.
        load: answers a request; gets what `SpareWorker.load` gets.
    """

    def __init__(self, dataset: Any, load: Callable[..., Any]) -> None:
        self.dataset = dataset
        self._load = load

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: tuple[int, Any] | None) -> tuple[int, Any]:
        """Answer a request that has a number."""
        return (0, None) if request is None else (request[0], self._load(*request[1]))


def _as_it_is(answer: Any) -> Any:
    return answer
