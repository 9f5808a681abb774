"""How deep to freeze pre-trained weights: a trial of several depths on the first batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_egeria.freezing.policy import FreezingPolicy
from lightning_egeria.freezing.trial_plan import Budget, candidate_depths, safe_depth, trial_steps
from lightning_egeria.profiling.clock import mark, reached, seconds_between
from lightning_egeria.profiling.costs import StepCosts
from lightning_egeria.training.branches import Branches
from lightning_egeria.training.freezer import Decision, Freezer
from lightning_egeria.training.observers import Observer


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
    """Freezes deep at once, and finds by trial how deep to stay.

    After a few steps it repeats them with fewer layer modules frozen, from the same weights, on the same batches. It
    goes shallower as long as the loss falls clearly more and the budget lasts, and training goes on from the winner. A
    loss is the mean of the last third of the steps, each on a batch that the weights have not trained on yet. Where the
    budget ends first, half of the chain freezes at most.

    The second step of the run trains everything, like the first one, and tells what a full step costs.

    Args:
        trainer: the Trainer.
        freezer: freezer of the model.
        policy: gets the answer by `FreezingPolicy.conclude`.
        costs: gets the time of a batch with nothing frozen, which the run may never have again.

    Attributes:
        over: whether there is an answer.
        frontier: the losses seen; None before the answer, and if there were too few steps for a trial.
    """

    def __init__(self, trainer: pl.Trainer, freezer: Freezer, policy: FreezingPolicy, costs: StepCosts) -> None:
        self.over = False
        self.frontier: Frontier | None = None
        self._trainer = trainer
        self._freezer = freezer
        self._policy = policy
        self._costs = costs
        chain, run_steps = freezer.chain, _steps_of(trainer)
        self._steps = trial_steps(run_steps)
        self._budget = Budget(run_steps, self._steps, len(chain))
        self._depths = candidate_depths(len(chain), chain.max_depth)
        self._safe = safe_depth(len(chain), chain.max_depth)
        self._branches: Branches | None = None
        self._device = trainer.strategy.root_device
        self._began: float | torch.cuda.Event | None = None
        self._full: tuple[float | torch.cuda.Event, float | torch.cuda.Event] | None = None

    def will_keep(self, batches_ahead: int) -> bool:
        """Whether it keeps the batch that comes ``batches_ahead`` after the last one."""
        kept = self._branches.batches if self._branches is not None else 0
        return not self.over and kept + batches_ahead <= self._steps * self._trainer.accumulate_grad_batches

    def batch_start(self, batch: Any, step: int) -> None:
        """Keep the batch, or time it if nothing is frozen."""
        if self._branches is not None:
            self._branches.batch_start(batch, step)
        elif not self.over and not self._freezer.depth:
            self._began = mark(self._device)

    def forward_end(self, loss: Tensor) -> None:
        """Keep the loss."""
        if self._branches is not None:
            self._branches.forward_end(loss)

    def decide(self) -> Decision | None:
        """Return the decision after an optimizer step, the same on all ranks; None keeps the depth."""
        if self._branches is not None:
            self._branches.stepped()
            if not self._freezer.ranks.share(self._branches.steps >= self._steps or self._branches.full):
                return None
            branches, self._branches = self._branches, None
            return self._conclude(branches)
        if self._freezer.depth:
            self._freezer.freeze_to(0, "the trial of depths begins again")  # resumed within one
        elif self._began is None:
            return None  # the first step; the second one is timed
        else:
            self._full = self._began, mark(self._device)
        first, *others = self._depths
        if others and not self._budget.allows(others[0], ahead=first):
            self.over = True
            self._take_full_step()
            self._policy.conclude(self._safe)
            return Decision(self._safe, "trained weights: the run is too short to try depths, so half of it freezes")
        self._branches = Branches(self._trainer, self._freezer)
        return Decision(first, f"trained weights: shallower depths are tried on the next {self._steps} batches")

    def _conclude(self, branches: Branches) -> Decision:
        self.over = True
        self._take_full_step()
        frontier, ended = self._compare(branches)
        self.frontier = frontier
        if not frontier.progress > 0:
            self._policy.compare_layers()
            return Decision(0, "no depth learned anything in the trial, so plasticity decides")
        depth = min(frontier.depth, self._safe) if ended else frontier.depth
        self._policy.conclude(depth)
        more = "; shallower depths would cost too much to try" if ended else ""
        return Decision(depth, frontier.describe() + more)

    def _compare(self, branches: Branches) -> tuple[Frontier, bool]:
        """Try depths, deepest first; training goes on from the winner.

        Returns:
            What was seen, and whether the budget ended before the answer.
        """
        enough, budget = self._policy.trial_progress, self._budget
        assert enough is not None  # or there would be no trial
        last = math.ceil(branches.batches / 3)
        run = branches.losses
        first, *others = self._depths
        with branches.repeating() as repeats:
            frontier = Frontier(_mean(repeats.without_learning(first, last)), enough)
            frontier.add(first, _mean(run[-last:]))
            for depth in others:
                best = frontier.depth
                if not budget.allows(depth, ahead=best):
                    return frontier, True
                if not frontier.add(depth, _mean(repeats.at(depth)[-last:])):
                    break
                repeats.keep()
                budget.lose(best)
        return frontier, False

    def _take_full_step(self) -> None:
        if self._full is not None and reached(self._full[1]):
            self._costs.add_repeated(0, seconds_between(*self._full))


def _steps_of(trainer: pl.Trainer) -> float:
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else math.inf


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
