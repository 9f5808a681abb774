"""What the training loader asks of the Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_egeria.core.batches.rows import Rows
from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.wrapping import BATCH_HOOKS, nested
from lightning_egeria.methods.selecting.scoring import PerSampleLoss, Scorer
from lightning_egeria.upstream.lightning import data_fetcher


class Transferred:
    """A batch that went through the hooks for batches already."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class TrainerAccess:
    """Answers for a Trainer in `fit`.

    Args:
        trainer: the Trainer.
        per_sample_loss: see `Scorer`.
        from_cache: see `Scorer`.

    Attributes:
        scorer: computes the loss of each sample.
    """

    def __init__(self, trainer: pl.Trainer, per_sample_loss: PerSampleLoss | None, from_cache: bool = False) -> None:
        self._trainer = trainer
        self.scorer = Scorer(trainer, per_sample_loss, from_cache)

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

    @property
    def has_batch_hooks(self) -> bool:
        """Whether the user's model or data module has hooks for batches."""
        own = list(nested(self._trainer.datamodule))[-1]  # type: ignore[attr-defined]  # the connectors set it
        users = (self._trainer.lightning_module, own)
        return any(is_overridden(hook, user) for user in users for hook in BATCH_HOOKS)

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

    def check(self, batch: Any, samples: int, number: int, rows: Callable[[Any, int], Rows]) -> None:
        """Compute the losses of a batch that is trained whole, to find out whether that is possible.

        Raises:
            PerSampleLossError: they cannot be had.
        """
        self.scorer.check(lambda: self.moved(batch), samples, number, rows)

    def reads_nothing_ahead(self) -> None:
        """Have Lightning read no batch of a loader without a length ahead: batches know which is the last."""
        data_fetcher(self._trainer).prefetch_batches = 0
