"""When the network in training is compared with the reference model, and with which snapshot."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_egeria.core.distributed.gathering import GatheredWeights
from lightning_egeria.core.network.sharding import holds_shards
from lightning_egeria.core.profiling.costs import StepCosts
from lightning_egeria.core.training.freezer import Freezer
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.freezing.evaluation import EvaluationQueue
from lightning_egeria.freezing.policy import Policy
from lightning_egeria.freezing.reference import Precision, ReferenceModel
from lightning_egeria.freezing.runner import ReferenceRunner, has_idle_core

EVALUATIONS_PER_RUN = 50  # bounds their cost, however long the run
EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN = 100
LEAST_STEPS_BETWEEN_EVALUATIONS = 8  # in fewer steps, layers that still learn hardly move either
UNANSWERED_TO_CHANGE = 3  # evaluations in a row; one answer is late whenever a new snapshot has to be prepared first


class ReferenceComparison(Observer):
    """Compares the network with the reference model every few steps, and times all steps.

    An evaluation step captures the inputs of the network, and then its weights. The reference works on them while
    training continues. `collect` returns the answer after the first step that finds one; with ``wait_s``, always at the
    next evaluation step. `EvaluationQueue` shows the life of an evaluation.

    With several ranks, only rank 0 compares. All ranks know when an evaluation is due.

    Args:
        freezer: freezer of the model in training.
        policy: decides whether to keep a reference, and how long.
        runner: runs the reference model.
        evaluate_every_n_steps: optimizer steps between two evaluations.
        samples: largest number of samples of a batch to compare.
        wait_s: seconds to wait for an answer that is due, so that decisions do not depend on timing; 0 does not wait.
        adapt: whether the interval may grow where answers come late.
        may_move: whether the reference may move to the training thread where answers come late.
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
        may_move: bool = False,
        notices: Notices | None = None,
    ) -> None:
        self.runner = runner
        self.costs = StepCosts()
        self.notices = notices if notices is not None else Notices("freezing")
        self.evaluations = EvaluationQueue(freezer.prefix, runner, self.costs, samples, wait_s, self.notices)
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.next_evaluation = freezer.step + evaluate_every_n_steps
        self.reference_age = 0
        self._freezer = freezer
        self._prefix = freezer.prefix
        self._policy = policy
        self._adapt = adapt
        self._may_move = may_move
        self._moved = False  # to the training thread, because answers came late
        self._longest_interval = 2 * evaluate_every_n_steps  # where the reference may move instead
        self._version = freezer.prefix.version
        self._gathered: GatheredWeights | None = None
        self._snapshot_due = False
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._device = next(freezer.prefix.module.parameters()).device
        self._step_before = freezer.step - 1
        self._steps_per_batch = 1  # more than one with several optimizers

    @property
    def wants_reference(self) -> bool:
        """Whether this rank compares, and the policy needs plasticity now."""
        return self._freezer.ranks.leads and self._policy.wants_reference and not self.evaluations.stopped

    @property
    def waits(self) -> bool:
        """Whether training waits for each answer, so that decisions do not depend on timing."""
        return self.evaluations.wait_s > 0

    @property
    def _compares(self) -> bool:
        """Whether this rank compares, and has a reference."""
        return self.runner.has_snapshot and self.wants_reference

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
        if step + self._steps_per_batch >= self.next_evaluation and self._compares:
            self.evaluations.capture()

    def forward_end(self, loss: Tensor) -> None:
        """Add the loss, and stop capturing."""
        value = loss.detach()
        self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
        self._loss_count += 1
        self.evaluations.forward_ended()
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.stop()
            if self.wants_reference:
                self._take_snapshot({**gathered.weights, **gathered.buffers})

    def backward_end(self) -> None:
        """Mark the end of the backward pass."""
        self.evaluations.backward_ended()

    def batch_end(self) -> None:
        """Add the time of the batch."""
        self.evaluations.forward_ended()
        self.costs.batch_end(self._device, self._prefix.depth, evaluated=self.evaluations.is_capturing)

    def abort(self) -> None:
        """Drop the captured batch."""
        self.evaluations.abort()
        if self._gathered is not None:
            self._gathered.stop()
            self._gathered = None

    def collect(self, step: int) -> tuple[float, ...] | None:
        """Return the plasticity of each layer module from the oldest pending evaluation; None without an answer.

        Call it after each optimizer step ``step``, before the decision and `optimizer_step`. At an evaluation step it
        also sends the captured step, so that a reference in this thread answers at once. If training waits for
        answers, `optimizer_step` sends it after the decision: a change of the prefix would void the answer, and the
        worker would be busy with it.
        """
        due = self.is_due(step)
        plasticity = self.evaluations.collect(step, due)
        if due and not self.waits:
            if self.evaluations.unanswered_in_a_row >= UNANSWERED_TO_CHANGE:
                self._get_answers_in_time(step)
            self._send(step)
            if plasticity is None:  # a reference in this thread has answered already
                plasticity = self.evaluations.collect(step, due=False)
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
                    self._send(step)
                with self.costs.evaluating():
                    self.refresh_reference()
        self.evaluations.abort()  # a captured step that was not an evaluation step in the end

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
            "moved": self._moved,
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
        self._moved = _has_moved(state)
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

    def _send(self, step: int) -> None:
        with self.costs.evaluating():
            self.evaluations.send(step, self._compares)

    def _take_snapshot(self, weights: Mapping[str, Tensor] | None) -> None:
        self._snapshot_due = False
        try:
            self.runner.take_snapshot(self._prefix.module, weights)
        except Exception as error:  # packing runs the user's code, which may raise anything
            self.evaluations.failed(f"{type(error).__name__}: {error}")

    def _get_answers_in_time(self, step: int) -> None:
        """Evaluate less often, or in the training thread: what costs less and brings answers in time.

        A longer interval costs the training thread nothing. It suffices if the process took at most twice the interval
        for a late answer. In the training thread no answer is late, and an evaluation takes about as long as one or two
        steps if training runs on the CPU, too. Where it does not, the reference stays in its process, and the interval
        grows as far as it has to. What the user has set stays.
        """
        every, queue = self.evaluate_every_n_steps, self.evaluations
        queue.unanswered_in_a_row = 0
        late = f"{UNANSWERED_TO_CHANGE} evaluations in a row had no answer from the reference process in time"
        longer = max(2 * every, queue.late_steps or 0)
        suffices = queue.late_steps is not None and longer <= self._longest_interval
        if self._adapt and (suffices or not self._may_move):
            self.evaluate_every_n_steps = longer
            self.notices.inform(f"{late}. Evaluations are {longer} steps apart from now on")
        elif self._may_move:
            self._may_move, self._moved = False, True
            with self.costs.evaluating():
                queue.move_to_thread()
            self.notices.inform(
                f"{late}. From step {step} on, the reference runs in the training thread, where an evaluation takes "
                "about as long as one or two steps. To keep it in a process, leave a core idle: use fewer threads or "
                "data-loader workers, and pass background=True"
            )
        else:
            self.notices.warn(
                f"{late}, and without answers nothing freezes. Leave out evaluate_every_n_steps, which you set to "
                f"{every}, or leave a core idle for the process",
                once="late",
            )


def _has_moved(state: Mapping[str, Any] | None) -> bool:
    """Whether the reference had moved to the training thread in the run that wrote a checkpoint."""
    return state is not None and bool(state.get("moved", False))


def comparison_of(
    trainer: pl.Trainer,
    freezer: Freezer,
    policy: Policy,
    notices: Notices,
    state: Mapping[str, Any] | None,
    *,
    evaluate_every_n_steps: int | None,
    samples: int,
    precision: Precision,
    background: bool | None,
    timeout_s: float,
    deterministic: bool | None,
) -> ReferenceComparison:
    """Return the comparison for one run, with a value for each argument of the callback that is None.

    Args:
        trainer: the Trainer, with its data loaders.
        freezer: freezer of the model.
        policy: the policy, after `Policy.start`.
        notices: takes log lines and warnings.
        state: state of the comparison in the checkpoint, whose precision replaces ``precision``; None without one.
        evaluate_every_n_steps: as for `KnowledgeGuidedFreezing`, like all that follow.
        samples: as ``evaluation_samples``.
        precision: as ``reference_precision``.
        background: where the reference runs.
        timeout_s: seconds after which a reference process that has not answered is replaced.
        deterministic: whether training waits for each result.
    """
    waits = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    crops, reason = None, "as requested"
    if state is not None:
        precision, crops = state["precision"] or precision, state["crops"] or None
    if precision == "auto" and waits:
        precision, reason = "float32", "the run is deterministic"  # the fastest may differ from run to run
    make = functools.partial(ReferenceModel, freezer.chain, samples, precision, crops, reason)
    runs_beside = background
    if runs_beside is None:
        runs_beside = has_idle_core(trainer.strategy.root_device, trainer.num_devices) and not _has_moved(state)
    return ReferenceComparison(
        freezer,
        policy,
        ReferenceRunner(make, freezer.chain.entries, runs_beside, timeout_s),
        evaluate_every_n_steps or evaluation_interval(trainer),
        samples,
        wait_s=timeout_s if waits else 0.0,
        adapt=evaluate_every_n_steps is None,
        may_move=background is None and runs_beside and trainer.strategy.root_device.type == "cpu",
        notices=notices,
    )


def evaluation_interval(trainer: pl.Trainer) -> int:
    """Return the optimizer steps between two evaluations that suit the length of the run.

    Args:
        trainer: the Trainer, with its data loaders.
    """
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps) or steps < 0:
        return EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN
    return max(LEAST_STEPS_BETWEEN_EVALUATIONS, round(steps / EVALUATIONS_PER_RUN))
