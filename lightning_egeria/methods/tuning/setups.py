"""The set-ups that branches can train in, and how long they may."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.core.training.feed import Feed
from lightning_egeria.core.training.support import check_setup
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.tuning import METHOD

TOO_SHORT = (
    "no search: a trial must end before the next validation and the last step of its epoch, and no steps are left. "
    "Use epochs of at least 20 steps, and a longer val_check_interval"
)


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse a Trainer in which branches cannot train.

    Raises:
        UnsupportedError: with what the method declares, or averages of weights.
    """
    check_setup(trainer, METHOD)
    averaging = getattr(pl.callbacks, "WeightAveraging", None)  # from Lightning 2.6 on
    if averaging is not None and any(isinstance(one, averaging) for one in getattr(trainer, "callbacks", ())):
        raise UnsupportedError(
            "branch tuning does not run with WeightAveraging: its averages would not include the steps of trials "
            "that are kept. Average the weights in the model, which trials restore"
        )


def check_schedulers(trainer: pl.Trainer, inform: Callable[[str], None]) -> None:
    """Refuse a scheduler that follows what is logged in each step, and tell what one misses that follows an epoch.

    Raises:
        UnsupportedError: a `ReduceLROnPlateau` steps behind each training step.
    """
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            raise UnsupportedError(
                "branch tuning does not run with ReduceLROnPlateau and interval='step': trials log nothing that it "
                "could follow. Use interval='epoch' and a metric of validation"
            )
        if config.reduce_on_plateau:
            inform(
                f"ReduceLROnPlateau follows {config.monitor!r}. If that is a mean over training steps, it does "
                "not include the steps of trials that are kept. Let it follow a metric of validation"
            )


def most_steps(trainer: pl.Trainer, feed: Feed, copies: int = 1) -> int:
    """Return the most optimizer steps of a trial: it ends before the last step of the epoch and before a validation.

    Args:
        trainer: the Trainer, between two optimizer steps.
        feed: its batches. Those of a trial may have a GiB of memory together.
        copies: how often they are kept, at other batch sizes.

    Raises:
        UnsupportedError: if the number of batches in an epoch is not known.
    """
    length = trainer.num_training_batches
    if math.isinf(length):
        raise UnsupportedError(
            "branch tuning must know where an epoch ends, and the train dataloader has no length. Give its dataset a "
            "__len__"
        )
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    left = int(length) - ready
    if left < 2:
        return 0
    batches = min(left - 1, batches_before_validation(trainer, ready), max(1, feed.room(copies)))
    most = batches // trainer.accumulate_grad_batches
    return most if trainer.max_steps == -1 else min(most, trainer.max_steps - trainer.global_step - 1)


def batches_before_validation(trainer: pl.Trainer, ready: int, length: int | None = None) -> int:
    """Return how many batches can follow before the Trainer validates within the epoch.

    Args:
        trainer: the Trainer.
        ready: batches of the epoch so far.
        length: batches of the epoch; None for that of the Trainer.
    """
    loop = trainer.fit_loop.epoch_loop
    every: Any = getattr(trainer, "val_check_batch", None)  # None if it validates by the clock
    if not trainer.enable_validation or every is None or math.isinf(every) or not loop._should_check_val_epoch():
        return sys.maxsize
    if length is not None and isinstance(trainer.val_check_interval, float):
        every = max(1, int(length * trainer.val_check_interval))
    if trainer.check_val_every_n_epoch is None:  # batches of earlier epochs count
        ready += loop.batch_progress.total.ready - loop.batch_progress.current.ready
    return int(every) - 1 - ready % int(every)
