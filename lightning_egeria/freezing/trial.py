"""How deep to freeze pre-trained weights: a trial of several depths on the first batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.branches import Branches
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.core.training.freezer import Decision, Freezer
from lightning_egeria.core.training.isolation import saving_later
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.freezing.loss_limits import LossLimits, untried_depth
from lightning_egeria.freezing.policy import FreezingPolicy
from lightning_egeria.freezing.trial_plan import LEAST_STEPS, Budget, candidate_depths, trial_steps

STEPS_BEFORE = 2  # of the run, before the trial
ENOUGH = 3 / 4  # of the trial's steps have to be left in the epoch
FEWEST_STEPS = 4  # whose batches have to fit into memory
SURE_EPOCHS = 10  # of a run that may end at any time


def worth(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the share of another branch's steps that teach it as much as all steps teach this one.

    It compares means over half of the batches: where, in the other branch, was the loss that this one has at the end?
    Unlike the fall of the loss, this hardly depends on the number of steps.

    Args:
        losses: loss of each batch.
        others: loss of each batch in the other branch, as many.

    Returns:
        A number in (0, 1]; 1 if the other branch ends no lower, or with a loss that is not finite.

    >>> worth([8.0, 7.0, 6.0, 5.0], [8.0, 6.0, 4.0, 2.0])
    0.6875
    >>> worth([5.0, 4.0], [5.0, 4.5]), worth([5.0, math.nan], [5.0, 4.0])
    (1.0, 0.5)
    """
    window = math.ceil(len(losses) / 2)
    end = _mean(losses[-window:])
    means = [_mean(others[at - window : at]) for at in range(window, len(others) + 1)]
    if end <= means[-1] or not math.isfinite(means[-1]):
        return 1.0
    for at in range(len(means) - 1, 0, -1):
        after, before = means[at], means[at - 1]
        if before >= end > after:
            return (window + at - (end - after) / (before - after)) / len(others)
    return window / len(others)


class Frontier:
    """The loss that each depth reaches, deepest first, and the depth to stay at.

    Going shallower stops where it no longer pays: where the steps at a depth are worth enough of those at the next one.

    Args:
        enough: share of the next depth's steps, in (0, 1].

    Attributes:
        losses: mean loss of the last half of the batches, by depth.
        worth: share of the steps at each depth but the first that the steps at the best depth before are worth.
        depth: deepest depth whose steps are worth nearly those at the next one; the last one until there is one.
        learned: whether the loss fell at `depth`.

    >>> frontier = Frontier(enough=0.95)
    >>> frontier.add(15, [5.0, 4.0, 3.0, 2.0]), frontier.add(12, [5.0, 3.0, 1.0, 0.9]), frontier.depth
    (True, True, 12)
    >>> frontier.add(9, [5.0, 3.0, 1.0, 0.9]), frontier.depth, frontier.learned
    (False, 12, True)
    >>> frontier.describe()
    'loss 2.5 with 15 frozen, 0.95 with 12, 0.95 with 9; steps are worth 0.69 of those with 12, 1.00 of those with 9'
    """

    def __init__(self, enough: float) -> None:
        self.losses: dict[int, float] = {}
        self.worth: dict[int, float] = {}
        self.depth = 0
        self.learned = False
        self._best: list[float] = []
        self._enough = enough

    def add(self, depth: int, losses: Sequence[float]) -> bool:
        """Add a depth, shallower than all before; return whether it is the one to stay at so far.

        Args:
            depth: the depth.
            losses: loss of each batch, of the same batches at each depth. One that is not finite never wins.
        """
        half = len(losses) // 2
        self.losses[depth] = _mean(losses[half:])
        if self._best:
            self.worth[depth] = worth(self._best, losses)
            if not self.worth[depth] < self._enough:
                return False
        self.depth, self._best = depth, list(losses)
        self.learned = self.losses[depth] < _mean(losses[: half or 1])
        return True

    def describe(self) -> str:
        """Return what was seen, for the log."""
        first, *others = (f"{loss:.3g} with {depth}" for depth, loss in self.losses.items())
        text = ", ".join([f"loss {first} frozen", *others])
        if not self.worth:
            return text
        shares = [f"{share:.2f} of those with {depth}" for depth, share in self.worth.items()]
        return f"{text}; steps are worth {', '.join(shares)}"


class DepthTrial:
    """Finds by trial how deep to freeze.

    After the second step it trains the next steps with all but a few layer modules frozen, unseen, and again, from the
    same weights and on the same batches, with fewer frozen. It goes shallower as long as steps teach clearly more there
    and the budget lasts. Training then takes these steps frozen to the winner. Each loss is of a batch that the weights
    have not trained on yet. Where the budget ends first, or layers behind the trained ones are untrained, no more
    freezes than the limits allow without a trial.

    The first two steps of the run train everything, so that what a full step costs is known. While the learning rate
    is 0, all steps do. Nor does the trial leave its epoch: where that is nearly over, it comes with the next one.

    Args:
        trainer: the Trainer.
        freezer: freezer of the model.
        policy: gets the answer by `FreezingPolicy.conclude`.
        limits: what the user accepts to lose.
        notices: takes log lines.
        max_depth: how many layer modules may freeze.
        untrained: path of a layer behind the trained ones that is not, so that there is nothing to try; None: there
            is none.

    Attributes:
        over: whether there is an answer.
        frontier: the losses seen; None before the answer, and if there were too few steps for a trial.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        freezer: Freezer,
        policy: FreezingPolicy,
        limits: LossLimits,
        notices: Notices,
        max_depth: int,
        untrained: str | None = None,
    ) -> None:
        self.over = False
        self.frontier: Frontier | None = None
        self._trainer = trainer
        self._freezer = freezer
        self._policy = policy
        self._limits = limits
        self._notices = notices
        self._untrained = untrained
        chain, run_steps = freezer.chain, _steps_of(trainer)
        self._steps = trial_steps(run_steps)
        self._budget = Budget(run_steps, self._steps, len(chain))
        self._depths = candidate_depths(len(chain), max_depth)
        weights, tables = _weights(freezer.prefix.module, chain), _tables(freezer.prefix.module, chain)
        self._untried = untried_depth(weights, max_depth, tables, limits, untrained is not None)
        self._begins = False  # with the next batch

    def decide(self, step: int, learning_rate: float) -> Decision | None:
        """Return the decision after an optimizer step, the same on all ranks; None where it comes later.

        Args:
            step: number of optimizer steps so far.
            learning_rate: learning rate of this step; while it is 0, the trial does not begin.
        """
        if step < STEPS_BEFORE or learning_rate == 0:
            return None
        first, *others = self._depths
        if not self._limits.progress:
            return self._without_trial("max_loss_points accepts any depth")
        if self._untrained is not None:
            return self._without_trial(f"what the untrained {self._untrained!r} learns would hide what other layers do")
        if others and not self._budget.allows(others[0], ahead=first):
            return self._without_trial("the run is too short to try depths")
        if (length := self._steps_in(self._trainer.num_training_batches)) < LEAST_STEPS:
            return self._without_trial(f"an epoch of {length:.0f} steps is too short to try depths")
        self._begins = True
        return None

    def run(self, feed: Feed) -> Decision | None:
        """Hold the trial before a batch and return its decision; None while it does not begin. Every rank must call it.

        Args:
            feed: batches of the Trainer, between two optimizer steps.
        """
        trainer, ranks = self._trainer, self._freezer.ranks
        ready, epoch = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches
        wanted, left = min(self._steps, self._steps_in(epoch)), self._steps_in(epoch - ready)
        if not self._begins or ready % trainer.accumulate_grad_batches or left < ENOUGH * wanted:
            return None
        (most,) = ranks.least([feed.room()])
        steps = int(min(wanted, left, self._steps_in(most)))
        if steps < FEWEST_STEPS:
            return self._without_trial("batches are too large to keep for a trial of depths")
        self._notices.inform(f"a trial of depths takes the next {steps} steps, and training then repeats them")
        branches = Branches(trainer, self._freezer, feed)
        with saving_later(trainer) as waiting:
            try:
                frontier, ended = self._compare(branches, steps)
            finally:
                branches.leave()
        for path, weights_only in ranks.share(waiting):
            trainer.save_checkpoint(path, weights_only)
        if frontier is None:
            return self._without_trial("the epoch ended while depths were tried")
        self.over = True
        self.frontier = frontier
        if not frontier.learned:
            self._policy.compare_layers()
            return Decision(0, "no depth learned anything in the trial, so plasticity decides")
        depth = min(frontier.depth, self._untried) if ended else frontier.depth
        self._policy.conclude(depth)
        more = "; shallower depths would cost too much to try" if ended else ""
        more += f", and max_loss_points allows {depth} without a trial" if depth < frontier.depth else ""
        return Decision(depth, frontier.describe() + more)

    def _steps_in(self, batches: float) -> float:
        return batches if math.isinf(batches) else batches // self._trainer.accumulate_grad_batches

    def _without_trial(self, why: str) -> Decision:
        self.over = True
        self._policy.conclude(self._untried)
        points = self._limits.points
        cost = f"at most {points:g} points" if points else "nothing"
        reason = (
            f"{why}, so the frozen share is the largest one that cost {cost} on the tasks of the proof. "
            "Compare with a run with freeze_until=0"
        )
        if not self._untried:
            self._notices.inform(f"nothing freezes: {reason}")
        return Decision(self._untried, f"trained weights: {reason}")

    def _compare(self, branches: Branches, steps: int) -> tuple[Frontier | None, bool]:
        """Try depths on some steps, deepest first.

        Returns:
            What was seen, None if the epoch ended; and whether the budget ended before the answer.
        """
        budget, accumulated = self._budget, self._trainer.accumulate_grad_batches
        frontier, trained = Frontier(self._limits.progress), None
        for depth in self._depths:
            best = frontier.depth
            if trained is not None and not budget.allows(depth, ahead=best):
                return frontier, True
            losses = branches.at(depth, steps * accumulated)
            if losses is None:
                return None, False
            losses = [loss * accumulated for loss in losses]  # Lightning divides them
            if trained is None:  # a batch without a loss has none at any depth
                trained = [at for at, loss in enumerate(losses) if loss != -math.inf]
                frontier.add(depth, [losses[at] for at in trained])
                continue
            if not frontier.add(depth, [losses[at] for at in trained]):
                break
            budget.lose(best)
        return frontier, False


def _weights(module: nn.Module, chain: LayerChain) -> list[int]:
    """How many weights each layer module has."""
    return [sum(module.get_parameter(name).numel() for name in one.parameters) for one in chain.layer_modules]


def _tables(module: nn.Module, chain: LayerChain) -> int:
    """How many layer modules at the front are tables of embeddings."""
    firsts = (module.get_submodule(name) for name in chain.names)
    return sum(1 for _ in itertools.takewhile(lambda first: isinstance(first, (nn.Embedding, nn.EmbeddingBag)), firsts))


def _steps_of(trainer: pl.Trainer) -> float:
    """How many steps the run has; where it may end at any time, of ten epochs at most."""
    steps = trainer.estimated_stepping_batches
    steps = steps if steps >= 0 else math.inf
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
    may_end = any(isinstance(one, EarlyStopping | Timer) for one in callbacks)
    if not may_end and not math.isinf(steps):
        return steps
    return min(steps, SURE_EPOCHS * trainer.num_training_batches / trainer.accumulate_grad_batches)


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses) if losses else math.nan
