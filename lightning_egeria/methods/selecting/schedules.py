"""When learning rates change and validation comes, although only some of the samples are trained."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

_NEVER = 10**12  # batches


class ScheduleByScoredBatches:
    """Steps learning rate schedulers, and begins validation, after as many forward batches as in a plain run.

    Lightning counts training batches. A schedule that is made for the whole run would end at half of its length, and
    a validation of each quarter of an epoch would come half as often.

    Schedulers with ``interval="step"`` are taken over; those of an epoch, and those that watch a metric, stay with
    Lightning. With manual optimization the module steps them itself.

    Args:
        trainer: the Trainer, after the optimizers are there.
        by_seen: otherwise training batches count, and only a validation at the end of an epoch comes there all the
            same.
    """

    def __init__(self, trainer: pl.Trainer, by_seen: bool) -> None:
        self._trainer, self._by_seen = trainer, by_seen
        self._frequencies: list[tuple[Any, int]] = []
        self._validates_every = trainer.val_check_batch
        self._seen_before = 0
        if by_seen and trainer.lightning_module.automatic_optimization:
            for config in trainer.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    self._frequencies.append((config, config.frequency))
                    config.frequency = _NEVER

    def restore(self) -> None:
        """Leave schedulers and validation to Lightning again. Safe to call twice."""
        for config, frequency in self._frequencies:
            config.frequency = frequency
        self._frequencies = []
        self._trainer.val_check_batch = self._validates_every

    def begin_epoch(self, seen: int) -> None:
        """An epoch begins, or resumes after ``seen`` forward batches."""
        self._seen_before = seen

    def batch_start(self, number: int, seen: int, is_last: bool) -> None:
        """Decide whether validation follows this training batch.

        Args:
            number: number of the training batch in its epoch, from 0.
            seen: number of forward batches of the epoch so far.
            is_last: no training batch follows in this epoch.
        """
        every, trainer = self._validates_every, self._trainer
        if every is None or every == float("inf"):
            return
        if not self._by_seen:
            at_end = (
                is_last and trainer.check_val_every_n_epoch is not None and not trainer.num_training_batches % every
            )
            trainer.val_check_batch = number + 1 if at_end else every
            return
        before, this = 0, number
        if trainer.check_val_every_n_epoch is None:  # it counts over the whole run
            before = trainer.current_epoch * int(trainer.num_training_batches)
            this = trainer.fit_loop.epoch_loop.total_batch_idx
        seen = max(seen, self._seen_before)
        is_due = (before + seen) // every > (before + self._seen_before) // every
        trainer.val_check_batch = this + 1 if is_due else _NEVER

    def batch_end(self, seen: int, is_last: bool) -> None:
        """Step the schedulers.

        Args:
            seen: number of forward batches of the epoch so far.
            is_last: no training batch follows in this epoch.
        """
        trainer = self._trainer
        batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
        seen = int(batches) if is_last and batches != float("inf") else max(seen, self._seen_before)
        for number in range(self._seen_before + 1, seen + 1):
            if number % accumulated and not (is_last and number == seen):
                continue
            for config, frequency in self._frequencies:
                if number % frequency == 0:
                    trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
        self._seen_before = seen
