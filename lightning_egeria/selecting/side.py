"""What the training loader asks of the Trainer."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.distributed.ranks import Ranks
from lightning_egeria.selecting.scoring import PerSampleLoss, Scorer
from lightning_egeria.training.callback import freezing_of


class TrainerSide:
    """Answers for a Trainer in `fit`.

    Args:
        trainer: the Trainer.
        per_sample_loss: see `Scorer`.

    Attributes:
        scorer: computes the loss of each sample.
    """

    def __init__(self, trainer: pl.Trainer, per_sample_loss: PerSampleLoss | None) -> None:
        self._trainer = trainer
        self.scorer = Scorer(trainer, per_sample_loss)

    @functools.cached_property
    def ranks(self) -> Ranks:
        """All processes of the job."""
        return Ranks(self._trainer.strategy.root_device)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._trainer.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._trainer.world_size

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._trainer.current_epoch

    @property
    def batches(self) -> int | None:
        """Number of forward batches of an epoch; None if the loader has no length."""
        batches = self._trainer.num_training_batches
        return None if batches == float("inf") else int(batches)

    def progress(self, number: int) -> float:
        """Return the share of the run that is over when batch ``number`` of the epoch begins; 0 without an end."""
        epochs, steps, batches = self._trainer.max_epochs, self._trainer.max_steps, self.batches
        over = [0.0]
        if epochs is not None and epochs > 0:
            over.append((self.epoch + (number / batches if batches else 0.0)) / epochs)
        if steps > 0:
            over.append(self._trainer.global_step / steps)
        return max(over)

    def compares_next(self) -> bool:
        """Whether a callback that freezes may measure plasticity on the next training batch."""
        freezing = freezing_of(self._trainer)
        return freezing is not None and freezing.will_compare(1)

    def moved(self, batch: Any) -> Any:
        """Return a batch on its device, after the hooks for batches."""
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def check(self, batch: Any, samples: int, number: int) -> None:
        """Compute the losses of a batch that is trained whole, to find out whether they can be had.

        Raises:
            PerSampleLossError: they cannot.
        """
        self.scorer.check(lambda: self.moved(batch), samples, number)
