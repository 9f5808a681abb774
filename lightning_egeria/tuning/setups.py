"""The set-ups that branches can train in, and how long they may."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.tuning.feed import MOST_BYTES, Feed

TRIED = ("SingleDeviceStrategy", "DDPStrategy")
TOO_SHORT = (
    "no search, because a trial ends before the last step of its epoch, and this one has no step to spare. Use epochs "
    "of at least 20 steps"
)


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse a Trainer in which branches cannot train.

    Raises:
        UnsupportedError: with a strategy that is not tested, or a training step that takes an iterator.
    """
    name = type(trainer.strategy).__name__
    if name not in TRIED:
        why = "FSDP2 divides the state" if name == "ModelParallelStrategy" else "tuning is not tested with it"
        raise UnsupportedError(f"branch tuning does not run with {name}: {why}. Use one device, or strategy='ddp'")
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedError(
            "branch tuning reads batches ahead, and a training_step with dataloader_iter reads them itself. Use "
            "training_step(batch, batch_idx)"
        )


def most_steps(trainer: pl.Trainer, feed: Feed) -> int:
    """Return the most optimizer steps of a trial: all steps of the epoch and of the run, except for the last.

    Args:
        trainer: the Trainer, between two optimizer steps.
        feed: its batches. Those of a trial may have a GiB of memory together.

    Raises:
        UnsupportedError: if the number of batches in an epoch is not known.
    """
    batches = trainer.num_training_batches
    if math.isinf(batches):
        raise UnsupportedError(
            "branch tuning must know where an epoch ends, and the train dataloader has no length. Give its dataset a "
            "__len__"
        )
    left = int(batches) - trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if left < 2:
        return 0
    most = min(left - 1, max(1, MOST_BYTES // max(1, feed.first_bytes()))) // trainer.accumulate_grad_batches
    return most if trainer.max_steps == -1 else min(most, trainer.max_steps - trainer.global_step - 1)
