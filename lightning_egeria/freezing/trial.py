"""How deep to freeze pre-trained weights: a trial of several depths on the first batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_egeria.freezing.policy import FreezingPolicy
from lightning_egeria.profiling.costs import StepCosts
from lightning_egeria.training.branches import Branches
from lightning_egeria.training.freezer import Decision, Freezer
from lightning_egeria.training.observers import Observer

STEPS_PER_RUN = 32  # a trial takes one of so many steps
LEAST_STEPS, MOST_STEPS = 8, 64
TIMED_BATCHES = 4  # with nothing frozen, of which the first does not count


def candidate_depths(layer_modules: int, max_depth: int) -> list[int]:
    """Return the depths to try, deepest first: all but 1, 3, 6, 12, ... layer modules, and none.

    Args:
        layer_modules: length of the chain.
        max_depth: how many may freeze.

    >>> candidate_depths(18, 17), candidate_depths(8, 6), candidate_depths(2, 1)
    ([17, 15, 12, 6, 0], [6, 5, 2, 0], [1, 0])
    """
    doubled = [layer_modules - 3 * 2**k for k in range(layer_modules.bit_length())]
    return sorted({max_depth, 0} | {depth for depth in doubled if 0 < depth < max_depth}, reverse=True)


def trial_steps(estimated_steps: float) -> int:
    """Return the optimizer steps of a trial in a run of so many.

    >>> trial_steps(100), trial_steps(640), trial_steps(float("inf"))
    (8, 20, 64)
    """
    return round(max(LEAST_STEPS, min(MOST_STEPS, estimated_steps / STEPS_PER_RUN)))


class Frontier:
    """The loss that each depth reaches, deepest first, and the depth to stay at.

    Going shallower stops where it no longer pays: where a depth makes at least a given share of the progress of the
    next one. Progress is the fall of the loss from the start.

    Args:
        start: loss with the weights of the start.
        enough: the share, in (0, 1].

    Attributes:
        start: loss with the weights of the start.
        losses: loss by depth.
        depth: deepest depth that makes nearly the progress of the next one; the last one until there is one.

    >>> frontier = Frontier(start=4.0, enough=0.95)
    >>> [frontier.add(*tried) for tried in [(17, 2.0), (15, 1.0), (12, 0.9)]]
    [True, True, False]
    >>> frontier.depth, frontier.describe()
    (15, 'the loss fell from 4 to 2 with 17 frozen, 1 with 15, 0.9 with 12')
    """

    def __init__(self, start: float, enough: float) -> None:
        self.losses: dict[int, float] = {}
        self.depth = 0
        self.start = start
        self._enough = enough

    @property
    def progress(self) -> float:
        """Fall of the loss at `depth`; not positive, or NaN, if nothing was learned there."""
        return self.start - self.losses[self.depth]

    def add(self, depth: int, loss: float) -> bool:
        """Add a depth, shallower than all before; return whether it is the one to stay at so far.

        A loss that is not finite is worse than all others.
        """
        self.losses[depth] = loss
        progress = self.start - loss
        first = len(self.losses) == 1
        if first or (math.isfinite(progress) and not self.progress >= self._enough * progress):
            self.depth = depth
            return True
        return False

    def describe(self) -> str:
        """Return what was seen, for the log."""
        first, *others = (f"{loss:.3g} with {depth}" for depth, loss in self.losses.items())
        return ", ".join([f"the loss fell from {self.start:.3g} to {first} frozen", *others])


class DepthTrial(Observer):
    """Freezes as deep as possible at once, and finds by trial how deep to stay.

    After a few steps it repeats them with fewer layer modules frozen, from the same weights, on the same batches. It
    goes shallower as long as the loss falls clearly more, and training goes on from the winner. A loss is the mean of
    the last third of the steps, each on a batch that the weights have not trained on yet.

    Args:
        trainer: the Trainer.
        freezer: freezer of the model.
        policy: gets the answer by `FreezingPolicy.conclude`.
        costs: gets the time of a batch with nothing frozen, which the run may never have again.

    Attributes:
        over: whether there is an answer.
        frontier: the losses seen; None before the answer.
    """

    def __init__(self, trainer: pl.Trainer, freezer: Freezer, policy: FreezingPolicy, costs: StepCosts) -> None:
        self.over = False
        self.frontier: Frontier | None = None
        self._trainer = trainer
        self._freezer = freezer
        self._policy = policy
        self._costs = costs
        self._steps = trial_steps(_steps_of(trainer))
        self._branches: Branches | None = None

    def will_keep(self, batches_ahead: int) -> bool:
        """Whether it keeps the batch that comes ``batches_ahead`` after the last one."""
        kept = self._branches.batches if self._branches is not None else 0
        return not self.over and kept + batches_ahead <= self._steps * self._trainer.accumulate_grad_batches

    def batch_start(self, batch: Any, step: int) -> None:
        """Keep the batch."""
        if self._branches is not None:
            self._branches.batch_start(batch, step)

    def forward_end(self, loss: Tensor) -> None:
        """Keep the loss."""
        if self._branches is not None:
            self._branches.forward_end(loss)

    def decide(self) -> Decision | None:
        """Return the decision after an optimizer step, the same on all ranks; None keeps the depth."""
        deepest = self._freezer.chain.max_depth
        if self._branches is None:
            self._freezer.freeze_to(0, "the trial of depths begins again")  # resumed within one
            self._branches = Branches(self._trainer, self._freezer)
            return Decision(deepest, f"trained weights: shallower depths are tried on the next {self._steps} batches")
        self._branches.stepped()
        if not self._freezer.ranks.share(self._branches.steps >= self._steps or self._branches.full):
            return None
        branches, self._branches, self.over = self._branches, None, True
        frontier = self.frontier = self._compare(branches)
        if not frontier.progress > 0:
            self._policy.compare_layers()
            return Decision(0, "no depth learned anything in the trial, so plasticity decides")
        self._policy.conclude(frontier.depth)
        return Decision(frontier.depth, frontier.describe())

    def _compare(self, branches: Branches) -> Frontier:
        """Try depths, deepest first, and return what was seen; training goes on from the winner."""
        chain, enough = self._freezer.chain, self._policy.trial_progress
        assert enough is not None  # or there would be no trial
        last = math.ceil(branches.batches / 3)
        run = branches.losses
        with branches.repeating() as repeats:
            frontier = Frontier(_mean(repeats.without_learning(last)), enough)
            frontier.add(chain.max_depth, _mean(run[-last:]))
            for depth in candidate_depths(len(chain), chain.max_depth)[1:]:
                if not frontier.add(depth, _mean(repeats.at(depth)[-last:])):
                    break
                repeats.keep()
            for seconds in repeats.seconds_at(0, TIMED_BATCHES)[1:]:
                self._costs.add_repeated(0, seconds)
        return frontier


def _steps_of(trainer: pl.Trainer) -> float:
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else math.inf


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
