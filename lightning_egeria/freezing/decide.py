"""Deciding the frozen depth from plasticity, the same on all ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.core.distributed.ranks import DepthBroadcast
from lightning_egeria.core.training.branches import Branches
from lightning_egeria.core.training.checkpoints import checkpoint_read
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.core.training.freezer import Decision, Freezer
from lightning_egeria.freezing.comparison import ReferenceComparison
from lightning_egeria.freezing.loss_limits import LossLimits, limits_of
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.freezing.pretrained import untrained_behind
from lightning_egeria.freezing.savings import share_of_step
from lightning_egeria.freezing.trial import DepthTrial, Frontier


@dataclasses.dataclass(frozen=True)
class LastEvaluation:
    """The latest comparison with the reference.

    Attributes:
        step: number of optimizer steps when the policy saw the result.
        plasticity: plasticity of each layer module; NaN where not measured.
        slopes: slope of each layer module's smoothed plasticity, for `SlopePolicy`; NaN elsewhere.
    """

    step: int
    plasticity: tuple[float, ...]
    slopes: tuple[float, ...]


class Decider:
    """Passes measured plasticity to the policy after each optimizer step, and returns its decision.

    With several ranks, rank 0 decides and sends its decision at evaluation steps. All ranks freeze after the same step.

    Args:
        freezer: freezer of the model in training.
        policy: the policy, after `Policy.start`.
        comparison: comparison with the reference.
        max_depth: largest depth that the policy may freeze; None is ``chain.max_depth``.

    Attributes:
        plasticity: plasticity that the policy saw after the last step; None without a result.
        last_evaluation: latest evaluation that the policy saw.
        trial: trial of depths that comes before the policy decides; None without one.
        declined: why the trial chose to freeze nothing; None if it did not.
        limits: what the user accepts to lose; None before `start_trial`.
    """

    def __init__(
        self, freezer: Freezer, policy: Policy, comparison: ReferenceComparison, max_depth: int | None = None
    ) -> None:
        self.freezer = freezer
        self.max_depth = freezer.chain.max_depth if max_depth is None else max_depth
        self.policy = policy
        self.comparison = comparison
        self.trial: DepthTrial | None = None
        self.declined: str | None = None
        self.limits: LossLimits | None = None
        self.plasticity: tuple[float, ...] | None = None
        self.last_evaluation: LastEvaluation | None = None
        self._gave_up = False
        self._wanted: Decision | None = None  # decision of rank 0, until the next broadcast

    @property
    def frontier(self) -> Frontier | None:
        """The losses of the trial; None before its end, and without a trial."""
        return self.trial.frontier if self.trial is not None else None

    @property
    def points_lost_in_proof(self) -> float | None:
        """The most that the limits cost on a task of the proof; None where they have not set the depth."""
        concluded = isinstance(self.policy, FreezingPolicy) and self.policy.concluded
        return self.limits.points if self.limits is not None and concluded else None

    def start_trial(self, trainer: pl.Trainer, norms: Mapping[str, bool], max_loss_points: float = 0.0) -> None:
        """Start a trial of depths if the policy wants one and the Trainer can run it.

        Args:
            trainer: the Trainer.
            norms: output of `evidence`; in front of an untrained part, a trial would show little.
            max_loss_points: loss that the user accepts.
        """
        self.limits = limits_of(max_loss_points)
        if not isinstance(self.policy, FreezingPolicy) or not self.policy.wants_trial:
            return
        if not Branches.possible(trainer):
            self.policy.compare_layers()
            return
        self.policy.start_trial()
        untrained = untrained_behind(norms, self.freezer.chain, self.freezer.ranks)
        notices = self.comparison.notices
        self.trial = DepthTrial(trainer, self.freezer, self.policy, self.limits, notices, self.max_depth, untrained)

    def try_depths(self, feed: Feed) -> Decision | None:
        """Run the trial of depths before a batch, if it is due, and return its decision.

        Args:
            feed: batches of the Trainer.
        """
        if self.trial is None or self.trial.over:
            return None
        with self.comparison.costs.evaluating():
            return self._noted(self.trial.run(feed))

    def needs_input(self, batches_ahead: int, accumulation: int) -> bool:
        """Whether the real input of the batch ``batches_ahead`` after the last one may be needed.

        Args:
            batches_ahead: at least 1.
            accumulation: batches per optimizer step.
        """
        if self.trial is not None and not self.trial.over:
            return True
        return self.comparison.will_compare(batches_ahead, accumulation)

    def decide(self, step: int, learning_rate: float) -> Decision | None:
        """Return the decision after optimizer step ``step``, the same on all ranks; None keeps the depth.

        Args:
            step: number of optimizer steps so far.
            learning_rate: learning rate of this step.
        """
        if self.trial is not None and not self.trial.over:
            return self._noted(self.trial.decide(step, learning_rate))
        ranks, due = self.freezer.ranks, self.comparison.is_due(step)
        decision = self._decide(step, learning_rate, due) if ranks.leads else None
        if not ranks.several:
            return decision
        self._wanted = decision if decision is not None else self._wanted
        if not due:
            return None
        decision, self._wanted = self._wanted, None
        every = self.comparison.evaluate_every_n_steps
        depth, reason = (decision.depth, decision.reason) if decision is not None else (self.freezer.depth, "")
        agreed = ranks.agree(DepthBroadcast(depth, every, reason))
        self.comparison.evaluate_every_n_steps = agreed.next_in_steps
        return Decision(agreed.depth, agreed.reason)

    def metrics(self) -> dict[str, float]:
        """Return what the loggers get: counts of evaluations, the time of what is frozen, and what was measured."""
        counts, chain, depth = self.comparison.evaluations.counts, self.freezer.chain, self.freezer.depth
        metrics: dict[str, float] = {
            "egeria/evaluations_done": counts.done,
            "egeria/evaluations_late": counts.late,
            "egeria/evaluations_dropped": counts.dropped,
            "egeria/reference_age": self.comparison.reference_age,
        }
        frozen_time = share_of_step(self, depth)
        if frozen_time is not None:
            metrics["egeria/frozen_step_time"] = frozen_time
        slopes = self.last_evaluation.slopes if self.last_evaluation is not None else ()
        for kind, values in (("plasticity", self.plasticity or ()), ("slope", slopes)):
            for name, value in list(zip(chain.names, values, strict=False))[depth:]:
                if math.isfinite(value):
                    metrics[f"egeria/{kind}/{name}"] = value
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of policy and comparison, and in a deterministic run the reference's weights.

        It has plain types and tensors.
        """
        return {
            "policy": {"class": type(self.policy).__name__, "state": self.policy.state_dict()},
            "comparison": self.comparison.state_dict(with_reference=self.comparison.waits),
            "max_depth": self.max_depth,
            "gave_up": self._gave_up,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. The policy starts again if it may freeze less now, or lacks a reference.

        Raises:
            CheckpointError: if the state is damaged or does not fit.
        """
        with checkpoint_read():
            self.policy.load_state_dict(state["policy"]["state"])
            self.comparison.load_state_dict(state["comparison"])
        if state.get("gave_up", False):
            self._gave_up = True
            self.comparison.stop()
        self.max_depth = min(state["max_depth"], self.freezer.chain.max_depth)
        if self.max_depth < state["max_depth"] or not self.comparison.runner.has_snapshot:
            self.policy.start(self.max_depth)

    def _noted(self, decision: Decision | None) -> Decision | None:
        """Return the decision of the trial; keep the reason of one that freezes nothing, if that is final."""
        if decision is not None and decision.depth == 0 and not self.policy.wants_reference:
            self.declined = decision.reason
        return decision

    def _decide(self, step: int, learning_rate: float, due: bool) -> Decision | None:
        self.plasticity = None
        if self._gave_up:
            return None
        if (name := self.freezer.regained_gradient) is not None:
            return self._give_up(name)
        self.plasticity = self.comparison.collect(step)
        decision = self.policy.observe(
            step,
            self.plasticity and self.freezer.chain.of_prefixes(self.plasticity, self.freezer.depth),
            learning_rate,
            self.comparison.mean_loss() if due else None,
            self.comparison.layer_shares(),
        )
        if self.plasticity is not None:
            slopes = slopes_of(self.policy, self.freezer.depth)
            self.last_evaluation = LastEvaluation(step, self.plasticity, slopes)
        return decision

    def _give_up(self, name: str) -> Decision:
        """Unfreeze everything for good: other code decides which parameters train."""
        self._gave_up = True
        self.comparison.stop()
        reason = f"the frozen parameter {name!r} received a gradient: {self.freezer.why_regained}"
        self.comparison.notices.warn(f"{reason}. Everything is unfrozen, and nothing freezes from now on")
        return Decision(0, reason)


def slopes_of(policy: Policy, depth: int) -> tuple[float, ...]:
    """Return the slopes of a `SlopePolicy`, NaN for the first ``depth`` layer modules; NaN or empty for others."""
    slopes = list(getattr(policy, "slopes", ()))
    return tuple([math.nan] * depth + slopes[depth:])
