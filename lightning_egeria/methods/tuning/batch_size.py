"""The batch size as a tunable: each branch divides the same samples into batches of another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import BatchSampler, DataLoader

from lightning_egeria.core.batches.reading import copy_of
from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from lightning_egeria.core.training.checkpoints import checkpoint_read
from lightning_egeria.core.training.loops import LoaderSource
from lightning_egeria.errors import EgeriaError, UnsupportedError
from lightning_egeria.methods.tuning.setups import batches_before_validation
from lightning_egeria.methods.tuning.spaces import Choice, Space, Value

FEWEST_BATCHES = 4  # of a first trial


class BatchSize:
    """Samples in a batch of one process.

    The Trainer gets a copy of the user's DataLoader, whose batches may change their size. In a search, a branch of
    another size trains on the samples that follow in the epoch, cut to its size. Training continues behind them.

    Args:
        space: the sizes.
    """

    changes_cost = True
    outside_checkpoints = True

    def __init__(self, space: Space) -> None:
        self.sizes: list[int] = [int(size) for size in space.values] if isinstance(space, Choice) else []
        self._valid = bool(self.sizes) and all(type(size) is int and size > 0 for size in getattr(space, "values", []))
        self._trainer: pl.Trainer | None = None
        self._adapted: AdaptedLoader | None = None
        self._refusal: EgeriaError | None = None
        self._source: LoaderSource | None = None
        self._state: Mapping[str, Any] | None = None  # of a checkpoint, or of the end of the last fit
        self._size: int | None = None
        self._rest: list[Any] = []  # ids of the epoch from the beginning of a search on
        self._done = 0  # batches before it
        self._length: float = 0  # batches of the epoch, then

    def attach(self, trainer: pl.Trainer, tell: Callable[[str], None]) -> None:
        """Let the Trainer load its data through this. `detach` ends it.

        Args:
            trainer: before it has loaded its data.
            tell: takes a warning.
        """
        self._adapted = self._refusal = self._state = self._size = None
        self._trainer = trainer
        self._source = LoaderSource.install(trainer, lambda loader: self._adapt(loader, trainer, tell))

    def detach(self) -> None:
        """Give the Trainer its own source of data back. Safe to call twice."""
        if self._trainer is None or self._source is None:
            return
        self._state = self.state()
        self._source.remove(self._trainer)
        self._trainer = self._source = self._adapted = None

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse data whose batches cannot change their size.

        Raises:
            UnsupportedError: if this fit cannot tune the batch size.
        """
        if self._refusal is not None:
            raise self._refusal
        if not self._valid:
            raise UnsupportedError("the values of 'batch_size' must be a Choice of integers of at least 1")
        if getattr(trainer, "overfit_batches", 0):
            raise UnsupportedError("overfit_batches replaces the sampler whose batches change their size. Remove one")
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                raise UnsupportedError(
                    f"{type(config.scheduler).__name__} counts steps, and a run has more or fewer of them with another "
                    "batch size. Give it interval='epoch', or do not tune the batch size"
                )

    def get(self, trainer: pl.Trainer | None) -> int:
        """Return the size."""
        assert self._size is not None  # the data are loaded
        return self._size

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the size that branches have; it is that of training after `go_on`."""
        self._size = int(value)
        if self._rest:
            trainer.fit_loop.max_batches = self._done + self._count(self._size)

    def begin(self, trainer: pl.Trainer) -> None:
        """A search begins, with the first batch of it loaded.

        Raises:
            TrainingDataError: if the sampler does not repeat its order.
        """
        batches = self._loaded.batches
        self._done, self._length = (
            trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            trainer.fit_loop.max_batches,
        )
        order = self._loaded.order()[: batches.most_samples]
        self._rest = order[batches.samples_before(self._done) :]

    def end(self) -> None:
        """A search is over. Safe to call twice."""
        self._rest = []

    def steps(self, steps: int, present: int, accumulated: int) -> int:
        """Return the optimizer steps of a branch that trains on the samples of ``steps`` steps of the present size.

        At least one, and at least one batch of the epoch is left for training.

        Args:
            steps: number of steps.
            present: size of training.
            accumulated: batches in a step.
        """
        size = self._size
        assert size is not None
        assert self._trainer is not None
        left = self._count(size)
        most = min(left - 1, batches_before_validation(self._trainer, self._done, self._done + left)) // accumulated
        return min(max(1, steps * present // size), most)

    def first_steps(self, steps: int, most: int) -> int:
        """Return the steps of a first trial in which each size has some batches, as far as the epoch has them."""
        present = self.get(self._trainer)
        needed = [-(-FEWEST_BATCHES * size // present) for size in self.sizes]
        return max([steps, *(one for one in needed if one <= most)])

    def batches(self, size: int) -> Iterator[Any]:
        """Yield the batches of the epoch from the beginning of the search on, as Lightning's data fetcher does.

        Raises:
            TrainingDataError: if the sampler does not repeat its order.
        """
        self._loaded.order()
        ids = [self._rest[first : first + size] for first in range(0, self._count(size) * size, size)]
        loader = copy_of(self._loaded.loader, batch_sampler=ids, persistent_workers=False)
        with self._loaded.preserved_generators():  # it draws a seed for workers
            loaded = iter(loader)
        return ((batch, number, 0) for number, batch in enumerate(loaded))

    def go_on(self, trainer: pl.Trainer, batches: int, restart: Callable[[], None]) -> None:
        """Continue training behind a branch, with its size.

        Args:
            trainer: the Trainer.
            batches: that the branch has had.
            restart: restarts the iteration over the Trainer's data.
        """
        adapted, size = self._loaded, self._size
        assert size is not None
        before = [adapted.batches.size_of(number) for number in range(self._done)]
        self._rest = []
        adapted.batches.change(size)
        adapted.restart([*before, *[size] * batches])
        with adapted.preserved_generators():
            restart()
        trainer.fit_loop.max_batches = self._length  # as validation knows it
        adapted.tell_length()

    def batch_start(self) -> None:
        """A batch of training begins."""
        self._loaded.tell_length()

    def begin_epoch(self) -> None:
        """An epoch begins; not one that is resumed."""
        self._loaded.begin_epoch()

    def begin_training(self) -> None:
        """Training begins, maybe within an epoch."""
        self._state = None
        self._loaded.begin_training()

    def state(self) -> Mapping[str, Any] | None:
        """Return size and place in the epoch, in plain types and tensors; None before the data are loaded."""
        if self._adapted is None or self._trainer is None:
            return self._state
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        return {"size": self._adapted.batches.batch_size, **self._adapted.state(done, begun=True)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Keep the state of a checkpoint until the data are loaded."""
        self._state = state

    @property
    def _loaded(self) -> AdaptedLoader:
        assert self._adapted is not None
        return self._adapted

    def _count(self, size: int) -> int:
        return len(self._rest) // size if self._loaded.batches.drop_last else -(-len(self._rest) // size)

    def _adapt(self, loader: Any, trainer: pl.Trainer, tell: Callable[[str], None]) -> Any:
        try:
            own = loader.batch_sampler if isinstance(loader, DataLoader) else None
            if own is not None and type(own) is not BatchSampler:
                raise UnsupportedError(
                    f"the batch sampler {type(own).__name__} chooses which samples are in a batch, so batch_size "
                    "cannot be tuned. Use the DataLoader's batch_size and sampler"
                )
            self._adapted = AdaptedLoader(loader, trainer, tell)
        except EgeriaError as error:
            self._refusal = error  # `check` raises it: here Lightning would leave DataLoader as it has changed it
            return loader
        batches = self._adapted.batches
        if self._size is not None:
            batches.change(self._size)  # loaded again, for a later epoch
        elif self._state is not None:
            with checkpoint_read("tuning"):
                batches.change(int(self._state["size"]))
                self._adapted.resume(self._state)
        self._size = batches.batch_size
        return self._adapted.loader
