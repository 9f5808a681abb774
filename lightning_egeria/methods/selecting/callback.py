"""Follows the training batches that the loader has yielded. It only translates hooks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.methods.selecting.loader import SelectedBatches
from lightning_egeria.methods.selecting.losses import LossTable
from lightning_egeria.methods.selecting.per_sample_loss import with_per_sample_losses
from lightning_egeria.methods.selecting.queue import TrainingBatchInfo
from lightning_egeria.methods.selecting.schedules import ScheduleByScoredBatches
from lightning_egeria.methods.selecting.stats import SelectionStats


class SelectionCallback(pl.Callback):
    """Tells Lightning of the last batch of an epoch, keeps the pace, and takes the losses of training forwards.

    It is among the callbacks of the Trainer during `fit` only.

    Args:
        loader: returns the training loader; None while there is none.
        stats: what is logged at the end of an epoch.
        table: takes the losses of training forwards; None if it does not want them.
        by_seen: whether learning rates and validation follow the samples seen, or those trained; None: both are all.
    """

    def __init__(
        self,
        loader: Callable[[], SelectedBatches | None],
        stats: SelectionStats,
        table: LossTable | None,
        by_seen: bool | None,
    ) -> None:
        self._loader, self._stats, self._table, self._by_seen = loader, stats, table, by_seen
        self._pace: ScheduleByScoredBatches | None = None
        self._current: TrainingBatchInfo | None = None
        self._wrapped: tuple[pl.LightningModule, Any] | None = None
        self._epoch = 0
        self._began = self._validation_began = 0.0
        self._goes_on = False  # the epoch began before a checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over schedulers, validation and the training step, as far as they are needed."""
        if self._loader() is None:
            return
        _end_epoch_of_checkpoint(trainer)
        if self._by_seen is not None:
            self._pace = ScheduleByScoredBatches(trainer, self._by_seen)
        if self._table is not None:
            self._wrapped = pl_module, vars(pl_module).get("training_step")
            step = pl_module.training_step

            @functools.wraps(step)
            def training_step(*args: Any, **kwargs: Any) -> Any:
                return self._trained(functools.partial(step, *args, **kwargs))

            vars(pl_module)["training_step"] = training_step

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch begins."""
        self._began = time.perf_counter()
        if self._pace is not None:
            self._pace.begin_epoch(0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A training batch begins."""
        loader = self._loader()
        self._current = loader.emitted.popleft() if loader is not None and loader.emitted else None
        if self._current is None:
            return
        self._epoch = trainer.current_epoch
        if self._current.last:
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        if loader is not None and (resumed := loader.take_resumed()):
            self._goes_on = True
            if self._pace is not None:
                self._pace.begin_epoch(resumed)
        if self._pace is not None:
            self._pace.batch_start(batch_idx, self._current.seen, self._current.last)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The training batch is over."""
        if self._current is not None:
            self._stats.count(self._epoch, trained=self._current.samples)
            self._stats.whole += self._current.samples if self._current.whole else 0
            if self._pace is not None:
                self._pace.batch_end(self._current.seen, self._current.last)
        self._current = None  # what runs the training step from now on scores

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue with the clock."""
        self._began += time.perf_counter() - self._validation_began

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the share that was trained."""
        self._current = None  # a batch that is skipped has no end
        if self._stats.epochs and self._loader() is not None:
            if not self._goes_on:
                self._stats.seconds.append((trainer.current_epoch, time.perf_counter() - self._began))
            self._goes_on = False
            _, seen, scored, trained = self._stats.epochs[-1]
            values = {"egeria/trained_share": trained / seen, "egeria/scored_share": scored / seen}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave everything as it was."""
        self.close()

    def close(self) -> None:
        """Leave everything as it was. Safe to call twice."""
        if self._pace is not None:
            self._pace.restore()
        if self._wrapped is not None:
            module, before = self._wrapped
            if before is None:
                vars(module).pop("training_step", None)
            else:
                vars(module)["training_step"] = before
        self._pace = self._wrapped = self._current = None

    def _trained(self, step: Callable[[], Any]) -> Any:
        """Run the training step, and take the losses of the samples."""
        ids: Sequence[Any] | None = self._current.ids if self._current is not None else None
        if ids is None or self._table is None:
            return step()
        self._current, current = None, self._current  # once a batch: an optimizer may run the step more than once
        try:
            output, losses = with_per_sample_losses(step, len(ids))
        finally:
            self._current = current
        self._table.update(ids, losses.double().cpu().numpy(), self._epoch)
        return output


def _end_epoch_of_checkpoint(trainer: pl.Trainer) -> None:
    """Begin a new epoch where a checkpoint is from the last batch of one, although Lightning counts more batches."""
    loop: Any = trainer.fit_loop.epoch_loop
    batches = trainer.num_training_batches
    if loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch and batches != float("inf"):
        loop.batch_progress.current.completed = int(batches) - 1  # Lightning adds the one in progress
