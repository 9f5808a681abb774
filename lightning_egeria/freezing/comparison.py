"""Comparing the network in training with the reference model, step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_egeria.distributed.gathering import GatheredWeights
from lightning_egeria.freezing.capture import StepCapture
from lightning_egeria.freezing.evaluations import Evaluations
from lightning_egeria.freezing.policy import Policy
from lightning_egeria.freezing.runner import ReferenceRunner
from lightning_egeria.network.sharding import holds_shards
from lightning_egeria.profiling.costs import StepCosts
from lightning_egeria.training.freezer import Freezer
from lightning_egeria.training.notices import Notices
from lightning_egeria.training.observers import Observer


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


class ReferenceComparison(Observer):
    """Compares the network with the reference model every few steps, and times all steps.

    An evaluation step captures the inputs of the network, and then its weights. The reference works on them while
    training continues. `collect` returns the answer after the first step that finds one; with ``wait_s``, always at the
    next evaluation step.

    With several ranks, only rank 0 compares. All ranks know when an evaluation is due.

    Args:
        freezer: freezer of the model in training.
        policy: decides whether to keep a reference, and how long.
        runner: runs the reference model.
        evaluate_every_n_steps: optimizer steps between two evaluations.
        samples: samples of a batch to compare, at most.
        wait_s: seconds to wait for an answer that is due, so that decisions do not depend on timing; 0 does not wait.
        adapt: evaluate half as often after two late answers in a row.
        notices: takes log lines and warnings.

    Attributes:
        costs: seconds of the training steps by frozen depth, and of the evaluations.
        evaluations: pending evaluations and their counts.
        next_evaluation: optimizer step at which the next evaluation is due.
        reference_age: number of evaluations since the reference was taken.
    """

    def __init__(
        self,
        freezer: Freezer,
        policy: Policy,
        runner: ReferenceRunner,
        evaluate_every_n_steps: int,
        samples: int,
        wait_s: float = 0.0,
        adapt: bool = False,
        notices: Notices | None = None,
    ) -> None:
        self.runner = runner
        self.costs = StepCosts()
        self.notices = notices if notices is not None else Notices("freezing")
        self.evaluations = Evaluations(freezer.prefix, runner, self.costs, samples, wait_s, self.notices)
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.next_evaluation = freezer.step + evaluate_every_n_steps
        self.reference_age = 0
        self._freezer = freezer
        self._prefix = freezer.prefix
        self._policy = policy
        self._adapt = adapt
        self._version = freezer.prefix.version
        self._capture: StepCapture | None = None
        self._gathered: GatheredWeights | None = None
        self._snapshot_due = False
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._device = next(freezer.prefix.module.parameters()).device
        self._step_before = freezer.step - 1
        self._steps_per_batch = 1

    @property
    def wants_reference(self) -> bool:
        """Whether this rank compares, and the policy needs plasticity now."""
        return self._freezer.ranks.leads and self._policy.wants_reference and not self.evaluations.stopped

    @property
    def waits(self) -> bool:
        """Whether training waits for each answer, so that decisions do not depend on timing."""
        return self.evaluations.wait_s > 0

    def will_compare(self, batches_ahead: int, accumulation: int = 1) -> bool:
        """Whether the batch that comes ``batches_ahead`` after the last one may be captured.

        Args:
            batches_ahead: number of batches after the last one; at least 1.
            accumulation: batches per optimizer step.
        """
        if not self.wants_reference:
            return False
        # With accumulation, the last step of an epoch may come early.
        windows = -(-batches_ahead // accumulation) + (accumulation > 1)
        earliest = self._step_before + batches_ahead // accumulation * self._steps_per_batch
        latest = self._step_before + windows * self._steps_per_batch
        first_due = self.next_evaluation - self._steps_per_batch
        intervals = -(-max(0, earliest - first_due) // self.evaluate_every_n_steps)
        return first_due + intervals * self.evaluate_every_n_steps <= latest

    # --- the moments of a step ---------------------------------------------------------------------------------------

    def batch_start(self, batch: Any, step: int) -> None:
        """Capture the step if an evaluation is due."""
        self._step_before = step
        self.costs.batch_start(self._device)
        if self._snapshot_due and self._gathered is None:
            self._gathered = GatheredWeights(self._prefix.module)
            self._gathered.start()
        due = step + self._steps_per_batch >= self.next_evaluation
        if due and self._capture is None and self.runner.has_snapshot and self.wants_reference:
            if not self.waits and not self.runner.ready():
                return  # the reference is still busy and could not take the step
            self._capture = self.evaluations.capture()
            self._capture.start()

    def forward_end(self, loss: Tensor) -> None:
        """Add the loss, and stop capturing."""
        value = loss.detach()
        self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
        self._loss_count += 1
        if self._capture is not None:
            self._capture.stop()
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.stop()
            if self.wants_reference:
                self._take_snapshot({**gathered.weights, **gathered.buffers})

    def backward_end(self) -> None:
        """Mark the end of the backward."""
        if self._capture is not None:
            self._capture.backward_ended()

    def batch_end(self) -> None:
        """Add the time of the batch."""
        if self._capture is not None:
            self._capture.stop()
        self.costs.batch_end(self._device, self._prefix.depth, evaluated=self._capture is not None)

    def abort(self) -> None:
        """Drop the captured batch."""
        if self._capture is not None:
            self._capture.stop()
        if self._gathered is not None:
            self._gathered.stop()
        self._capture = self._gathered = None

    def collect(self, step: int) -> tuple[float, ...] | None:
        """Return the plasticity of each layer module from the oldest pending evaluation; None without an answer.

        Call it after each optimizer step ``step``, before `optimizer_step`.
        """
        self._steps_per_batch = step - self._step_before  # more than one with several optimizers
        due = self.is_due(step)
        plasticity = self.evaluations.collect(due)
        if due and not self.waits:
            self._send()
            if plasticity is None:  # a reference in this thread has answered already
                plasticity = self.evaluations.collect(due=False)
        # One answer is late whenever the reference has a new snapshot to prepare first.
        if self._adapt and self.evaluations.late_in_a_row >= 2:
            self._evaluate_half_as_often()
        return plasticity

    def layer_shares(self) -> list[float] | None:
        """Return each layer module's share of a step; None if not measured, and with ``wait_s``."""
        shares = self.costs.layer_shares(len(self._prefix.chain))
        known = [share for share in shares if share is not None]
        return known if len(known) == len(shares) and not self.waits else None

    def is_due(self, step: int) -> bool:
        """Whether optimizer step ``step`` is an evaluation step; the same on all ranks."""
        return step >= self.next_evaluation

    def mean_loss(self) -> float | None:
        """Return the mean of the losses since the last call; None if there were none."""
        if self._loss_sum is None:
            return None
        mean = float(self._loss_sum) / self._loss_count
        self._loss_sum, self._loss_count = None, 0
        return mean

    def optimizer_step(self, step: int) -> None:
        """Send the captured step to the reference, and take a new reference if one is due."""
        self._steps_per_batch = step - self._step_before
        if self._prefix.version != self._version:  # pending answers are about the earlier prefix
            self._version = self._prefix.version
            self.evaluations.void()
        if self.is_due(step):
            self.next_evaluation = step + self.evaluate_every_n_steps
            if self._freezer.ranks.leads:
                if self.waits:
                    # Not before the decision: a change of the prefix would void the answer and keep the worker busy.
                    self._send()
                with self.costs.evaluating():
                    self.refresh_reference()
        self._capture = None

    def refresh_reference(self, gathered: Mapping[str, Tensor] | None = None) -> None:
        """Take a new snapshot if one is due. The first one has the initial weights.

        If FSDP2 shards the weights, the next forward takes the snapshot, because it gathers them.

        Args:
            gathered: weights that FSDP2 has just gathered, by name.
        """
        if not self.wants_reference:
            self.evaluations.forget()
            self._snapshot_due = False
            return
        self.reference_age += 1
        if self.runner.has_snapshot and self._policy.holds_reference:
            return
        self.reference_age = 0
        if gathered is None and holds_shards(self._prefix.module):
            self._snapshot_due = True
        else:
            self._take_snapshot(gathered)

    def stop(self) -> None:
        """Stop comparing."""
        self.abort()
        self.evaluations.stop()

    def close(self) -> None:
        """Restore the modules, and end the reference process. Safe to call twice."""
        self.abort()
        self.evaluations.forget()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, with_reference: bool) -> dict[str, Any]:
        """Return the state in plain types and tensors.

        Args:
            with_reference: also store the reference's weights, and wait for pending evaluations.
        """
        return {
            **self.evaluations.state_dict(with_answers=with_reference),
            "depth": self._prefix.depth,
            "next_evaluation": self.next_evaluation,
            "evaluate_every_n_steps": self.evaluate_every_n_steps,
            "reference_age": self.reference_age,
            "loss_sum": None if self._loss_sum is None else float(self._loss_sum),
            "loss_count": self._loss_count,
            "snapshot_due": self._snapshot_due,
            "reference": self.runner.snapshot_tensors() if with_reference else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            CheckpointError: if the reference's weights do not fit the model.
        """
        self.next_evaluation = state["next_evaluation"]
        if self._adapt:
            self.evaluate_every_n_steps = state["evaluate_every_n_steps"]
        self.reference_age = state["reference_age"]
        self._loss_sum = None if state["loss_sum"] is None else torch.tensor(state["loss_sum"])
        self._loss_count = state["loss_count"]
        self.evaluations.load_state_dict(state, with_answers=self._freezer.ranks.leads)
        if self._prefix.depth != state["depth"]:
            self.evaluations.void()  # the answers are about another prefix
        if not self._freezer.ranks.leads:
            return
        self._snapshot_due = state["snapshot_due"]
        if state["reference"] is not None:
            self.runner.restore_snapshot(self._prefix.module, state["reference"])

    # --- the work ----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        capture, self._capture = self._capture, None
        with self.costs.evaluating():
            if self.runner.has_snapshot and self.wants_reference:
                self.evaluations.send(capture)
            else:
                self.evaluations.skip()

    def _take_snapshot(self, weights: Mapping[str, Tensor] | None) -> None:
        self._snapshot_due = False
        try:
            self.runner.take_snapshot(self._prefix.module, weights)
        except Exception as error:  # packing runs the user's code, which may raise anything
            self.evaluations.failed(f"{type(error).__name__}: {error}")

    def _evaluate_half_as_often(self) -> None:
        self.evaluations.late_in_a_row = 0
        self.evaluate_every_n_steps *= 2
        self.notices.inform(
            "the reference takes longer than the interval between two evaluations; evaluating every "
            f"{self.evaluate_every_n_steps} steps from now on"
        )


def slopes_of(policy: Policy, depth: int) -> tuple[float, ...]:
    """Return the slopes of a `SlopePolicy`, NaN for the first ``depth`` layer modules; NaN or empty for others."""
    slopes = list(getattr(policy, "slopes", ()))
    return tuple([math.nan] * depth + slopes[depth:])
