"""How deep to freeze pre-trained weights: a trial of several depths on the first batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_egeria.freezing.policy import FreezingPolicy
from lightning_egeria.freezing.trial_plan import Budget, candidate_depths, safe_depth, trial_steps
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.training.branches import Branches
from lightning_egeria.training.freezer import Decision, Freezer
from lightning_egeria.training.observers import Observer


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


class DepthTrial(Observer):
    """Freezes deep at once, and finds by trial how deep to stay.

    After a few steps it repeats them with fewer layer modules frozen, from the same weights, on the same batches. It
    goes shallower as long as steps teach clearly more there and the budget lasts, and training goes on from the winner.
    Each loss is of a batch that the weights have not trained on yet. Where the budget ends first, or layers behind
    the trained ones are untrained, half of the chain freezes at most, tables of embeddings in front not counted.

    The first two steps of the run train everything, so that what a full step costs is known. While the learning rate
    is 0, all steps do.

    Args:
        trainer: the Trainer.
        freezer: freezer of the model.
        policy: gets the answer by `FreezingPolicy.conclude`.
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
        untrained: str | None = None,
    ) -> None:
        self.over = False
        self.frontier: Frontier | None = None
        self._trainer = trainer
        self._freezer = freezer
        self._policy = policy
        self._untrained = untrained
        chain, run_steps = freezer.chain, _steps_of(trainer)
        self._steps = trial_steps(run_steps)
        self._budget = Budget(run_steps, self._steps, len(chain))
        self._depths = candidate_depths(len(chain), chain.max_depth)
        self._safe = safe_depth(len(chain), chain.max_depth, _tables(freezer.prefix.module, chain))
        self._branches: Branches | None = None
        self._may_begin = False  # the first step is over

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

    def decide(self, learning_rate: float) -> Decision | None:
        """Return the decision after an optimizer step, the same on all ranks; None keeps the depth.

        Args:
            learning_rate: learning rate of this step; while it is 0, the trial does not begin.
        """
        if self._branches is not None:
            self._branches.stepped()
            if not self._freezer.ranks.share(self._branches.steps >= self._steps or self._branches.full):
                return None
            branches, self._branches = self._branches, None
            return self._conclude(branches)
        if self._freezer.depth:
            self._freezer.freeze_to(0, "the trial of depths begins again")  # resumed within one
        elif not self._may_begin or learning_rate == 0:
            self._may_begin = True
            return None
        first, *others = self._depths
        why_not = None
        if self._untrained is not None:
            why_not = f"what the untrained {self._untrained!r} learns would hide what other layers do"
        elif others and not self._budget.allows(others[0], ahead=first):
            why_not = "the run is too short to try depths"
        if why_not is not None:
            self.over = True
            self._policy.conclude(self._safe)
            return Decision(self._safe, f"trained weights: {why_not}, so half of it freezes")
        self._branches = Branches(self._trainer, self._freezer)
        return Decision(first, f"trained weights: shallower depths are tried on the next {self._steps} batches")

    def _conclude(self, branches: Branches) -> Decision:
        self.over = True
        frontier, ended = self._compare(branches)
        self.frontier = frontier
        if not frontier.learned:
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
        first, *others = self._depths
        frontier = Frontier(enough)
        frontier.add(first, branches.losses)
        with branches.repeating() as repeats:
            for depth in others:
                best = frontier.depth
                if not budget.allows(depth, ahead=best):
                    return frontier, True
                if not frontier.add(depth, repeats.at(depth)):
                    break
                repeats.keep()
                budget.lose(best)
        return frontier, False


def _tables(module: nn.Module, chain: LayerChain) -> int:
    """How many layer modules at the front are tables of embeddings."""
    firsts = (module.get_submodule(name) for name in chain.names)
    return sum(1 for _ in itertools.takewhile(lambda first: isinstance(first, (nn.Embedding, nn.EmbeddingBag)), firsts))


def _steps_of(trainer: pl.Trainer) -> float:
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else math.inf


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
