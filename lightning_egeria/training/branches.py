"""Training some steps from one moment of a fit at several frozen depths, before the fit goes on from that moment."""

from __future__ import annotations

import itertools
import math

import lightning.pytorch as pl

from lightning_egeria.errors import TrainingDataError
from lightning_egeria.training.feed import BranchFeed, Feed
from lightning_egeria.training.fit_state import FitState
from lightning_egeria.training.freezer import Freezer
from lightning_egeria.training.loops import fetches_batches
from lightning_egeria.training.unseen import BranchRecorder, advance, unseen


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
        recorder, feed = BranchRecorder(freezer), BranchFeed(self._feed.ahead.from_here(0), lambda: None)
        ended = False
        with unseen(trainer, recorder):
            for _ in itertools.repeat(None, batches):
                try:
                    advance(trainer, feed)
                except (StopIteration, TrainingDataError):
                    ended = True
                    break
        if freezer.ranks.largest(ended):
            return None
        return freezer.ranks.mean([-math.inf if loss is None else loss for loss in recorder.take()])

    def leave(self) -> None:
        """Return to the moment of the start."""
        self._parent.restore()
