"""Training some steps from one moment of a fit several times, before the fit continues from that moment."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_egeria.core.training.feed import BranchFeed, Feed
from lightning_egeria.core.training.fit_state import FitState
from lightning_egeria.core.training.freezer import Freezer
from lightning_egeria.core.training.isolation import hidden
from lightning_egeria.core.training.loops import fetches_batches
from lightning_egeria.errors import TrainingDataError
from lightning_egeria.upstream.lightning import count_logging_step, is_accumulating


def train_hidden(
    trainer: pl.Trainer,
    freezer: Freezer | None,
    feed: BranchFeed,
    batches: int,
    after_batch: Callable[[], object] = lambda: None,
) -> list[float | None]:
    """Train on some batches as ``_TrainingEpochLoop.run`` does, hidden from callbacks and loggers, without validation.

    Args:
        trainer: the Trainer, between two optimizer steps.
        freezer: freezer of the model, if there is one.
        feed: the batches.
        batches: how many.
        after_batch: called after each.

    Returns:
        The loss of each batch in this process; None where the training step returned none.

    Raises:
        StopIteration: ``on_train_batch_start`` returned -1, which ends the epoch.
        TrainingDataError: the data ended.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    recorder = _Recorder(freezer)
    with hidden(trainer, recorder):
        for _ in range(batches):
            loop.restarting = False
            loop.advance(feed)
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            if not is_accumulating(trainer):
                count_logging_step(trainer)
            after_batch()
    return [None if loss is None else float(loss) for loss in recorder.losses]


class Branches:
    """Trains from this moment of a fit at several frozen depths, each time on the batches that come next.

    A branch goes through Lightning's training loop with all hooks of the module, as the fit itself will. Callbacks and
    loggers do not see it, and ``self.log`` does nothing. The fit has the same batches again, so it is the one that
    freezes to the chosen depth at this moment, whatever the program does in its steps. Create it between two optimizer
    steps, and call `leave` at the end. Every rank must make the same calls.

    Args:
        trainer: the Trainer.
        freezer: freezer of the model, at depth 0.
        feed: batches of the Trainer.
    """

    def __init__(self, trainer: pl.Trainer, freezer: Freezer, feed: Feed) -> None:
        self._trainer, self._freezer, self._feed = trainer, freezer, feed
        self._parent = FitState(trainer, freezer)

    @staticmethod
    def possible(trainer: pl.Trainer) -> bool:
        """Whether steps of this run can be tried: automatic optimization, and a step that takes a batch."""
        module = trainer.lightning_module
        return module.automatic_optimization and not fetches_batches(module.training_step)

    def at(self, depth: int, batches: int) -> list[float] | None:
        """Train at a depth and return the loss of each batch, the mean of all ranks.

        Args:
            depth: number of layer modules to freeze.
            batches: at most what is left of the epoch.

        Returns:
            The losses, -inf for a batch without one; None if the epoch ends before.
        """
        trainer, freezer, prefix = self._trainer, self._freezer, self._freezer.prefix
        self._parent.restore()
        if depth:
            freezer.ranks.share_buffers(prefix.buffers(depth))
            prefix.set_depth(depth)
            freezer.update_reducer()
        feed, losses = BranchFeed(self._feed.ahead.from_here(0), lambda: None), None
        with contextlib.suppress(StopIteration, TrainingDataError):
            losses = train_hidden(trainer, freezer, feed, batches)
        if freezer.ranks.largest(losses is None) or losses is None:
            return None
        return freezer.ranks.mean([-math.inf if loss is None else loss for loss in losses])

    def leave(self) -> None:
        """Return to the moment of the start."""
        self._parent.restore()


class _Recorder(pl.Callback):
    """The only callback of hidden training: it notes losses, and tells the freezer of the moments of training."""

    def __init__(self, freezer: Freezer | None) -> None:
        self._freezer = freezer
        self.losses: list[Tensor | None] = []
        self._steps_before = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Tell the freezer."""
        self._steps_before = trainer.global_step
        if self._freezer is not None:
            self._freezer.batch_start(None, trainer.global_step)

    def on_after_backward(self, *args: Any) -> None:
        """Tell the freezer."""
        if self._freezer is not None:
            self._freezer.backward_end()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Note the loss, and tell the freezer."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.losses.append(loss.detach().clone() if isinstance(loss, Tensor) else None)
        if self._freezer is not None:
            self._freezer.batch_end()
            if trainer.global_step > self._steps_before:
                self._freezer.optimizer_step(trainer.global_step)
