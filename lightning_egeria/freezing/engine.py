"""From the steps of a training run to freezing decisions, without a trainer."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_egeria.compilation import forget_compiled
from lightning_egeria.freezing.capture import StepCapture
from lightning_egeria.freezing.costs import StepCosts
from lightning_egeria.freezing.evaluations import Evaluations
from lightning_egeria.freezing.policy import Decision, Policy
from lightning_egeria.freezing.pool import ReferencePool
from lightning_egeria.freezing.ranks import Ranks, Word
from lightning_egeria.freezing.sharded import PassingWeights
from lightning_egeria.layers import FrozenPrefix
from lightning_egeria.tracing import holds_shards


@dataclasses.dataclass(frozen=True)
class FreezingEvent:
    """One change of the frozen depth.

    Attributes:
        step: optimizer steps done when it happened.
        kind: ``"freeze"`` or ``"unfreeze"``.
        depth: frozen depth from here on.
        reason: why, in words and numbers.
    """

    step: int
    kind: str
    depth: int
    reason: str


@dataclasses.dataclass(frozen=True)
class LastEvaluation:
    """What the newest comparison with the reference has shown.

    Attributes:
        step: optimizer steps done when the policy saw it.
        plasticity: of each layer module; NaN where it was not measured.
        slopes: of the smoothed plasticity of each, as the policy sees them; NaN where it sees none.
    """

    step: int
    plasticity: tuple[float, ...]
    slopes: tuple[float, ...]


class FreezingEngine:
    """Observes evaluation steps, has the reference compare them, and asks the policy.

    Call `begin_step`, `end_forward`, `end_backward`, `end_batch` and `end_step` in this order around each training
    step. What an evaluation says is applied at the end of the first step that finds the answer there; with ``wait_s``
    always at the next evaluation step (with more than one worker, that many evaluation steps later).

    Of several processes, the first evaluates and decides. It tells the others at evaluation steps, and all apply it
    there.

    Args:
        prefix: the frozen prefix of the model in training.
        policy: decides; `Policy.start` must have been called.
        pool: of the reference models.
        evaluate_every_n_steps: optimizer steps from one evaluation to the next.
        refresh_every_n_evaluations: evaluations after which the reference takes over the weights again, unless the
            policy holds on to it.
        evaluation_samples: how many samples of a batch are compared at most.
        in_flight: how many evaluations may be under way; as many as there are workers.
        wait_s: seconds to wait for an answer that is due, so that nothing depends on when it comes; 0: do not wait.
        adapt: evaluate half as often whenever two answers in a row are late.
        step: optimizer steps done before.
        ranks: the processes that train the model; by default all there are.

    Attributes:
        messages: what the user should be told, as logging levels and texts; whoever tells it removes it.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        policy: Policy,
        pool: ReferencePool,
        evaluate_every_n_steps: int,
        refresh_every_n_evaluations: int,
        evaluation_samples: int,
        in_flight: int = 1,
        wait_s: float = 0.0,
        adapt: bool = False,
        step: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks if ranks is not None else Ranks()
        self.prefix = prefix
        self.policy = policy
        self.pool = pool
        self.costs = StepCosts()
        self.evaluations = Evaluations(prefix, pool, self.costs, evaluation_samples, in_flight, wait_s)
        self.messages = self.evaluations.messages
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.next_evaluation = step + evaluate_every_n_steps
        self.plasticity: tuple[float, ...] | None = None
        self.last_evaluation: LastEvaluation | None = None
        self.reference_age = 0
        self._refresh_every = refresh_every_n_evaluations
        self._adapt = adapt
        self._capture: StepCapture | None = None
        self._passing: PassingWeights | None = None
        self._snapshot_due = False
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._gave_up = False
        self._learning: str | None = None  # a frozen parameter that was given a gradient
        self._wanted: Decision | None = None  # of the first of several ranks, until it tells the others
        self._prefix_at_end: dict[str, Any] | None = None
        self._began = 0.0
        self._step_before = step - 1
        self._steps_per_batch = 1
        prefix.listeners.append(self)

    def prefix_changed(self, prefix: FrozenPrefix) -> None:
        """An evaluation of the prefix before says nothing of the one after."""
        self.evaluations.void()
        forget_compiled()

    def observes(self, batches_ahead: int, accumulation: int = 1) -> bool:
        """Whether the batch so many after the last one may be observed, of which ``accumulation`` make a step."""
        if not self._wants_reference():
            return False
        # The last step of an epoch may come early where several batches make one.
        windows = -(-batches_ahead // accumulation) + (accumulation > 1)
        earliest = self._step_before + batches_ahead // accumulation * self._steps_per_batch
        latest = self._step_before + windows * self._steps_per_batch
        first_due = self.next_evaluation - self._steps_per_batch
        intervals = -(-max(0, earliest - first_due) // self.evaluate_every_n_steps)
        return first_due + intervals * self.evaluate_every_n_steps <= latest

    def begin_step(self, step: int, real_input: bool = True) -> None:
        """A forward is about to run, after ``step`` optimizer steps; in an accumulation window, one of several.

        Args:
            step: optimizer steps done.
            real_input: whether the network is given an input that the reference can be given too.
        """
        self._step_before = step
        self._began = time.perf_counter()
        self.prefix.begin_batch()
        if self._snapshot_due and self._passing is None:
            self._passing = PassingWeights(self.prefix.module)
            self._passing.start()
        due = step + self._steps_per_batch >= self.next_evaluation
        if due and real_input and self._capture is None and self.pool.has_snapshot and self._wants_reference():
            if not self.evaluations.wait_s and not self.pool.ready():
                return  # observing the step would be for nothing
            self._capture = self.evaluations.capture()
            self._capture.start()

    def refresh_reference(self, passing: PassingWeights | None = None) -> None:
        """Take a snapshot if it is time; the first, before the first step, is of the weights that were given.

        If weights are divided among ranks it is taken in the next forward, when they pass by.

        Args:
            passing: those that have just passed by.
        """
        if not self._wants_reference():
            self.evaluations.forget()
            self._snapshot_due = False
            return
        self.reference_age += 1
        if self.pool.has_snapshot and (self.reference_age < self._refresh_every or self.policy.holds_reference):
            return
        self.reference_age = 0
        if passing is None and holds_shards(self.prefix.module):
            self._snapshot_due = True
        else:
            self._take_snapshot(passing.weights if passing is not None else None)

    def _take_snapshot(self, weights: Mapping[str, Tensor] | None) -> None:
        self._snapshot_due = False
        try:
            self.pool.take_snapshot(self.prefix.module, weights)
        except Exception as error:  # packing runs the user's own code, which may raise anything
            self.evaluations.failed(f"{type(error).__name__}: {error}")

    def end_forward(self, loss: Tensor) -> None:
        """The forward is done and gave ``loss``; its backward comes now."""
        value = loss.detach()
        self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
        self._loss_count += 1
        if self._capture is not None:
            self._capture.stop()
        passing, self._passing = self._passing, None
        if passing is not None:
            passing.stop()
            if self._wants_reference():
                self._take_snapshot({**passing.weights, **passing.buffers})

    def end_backward(self, device: torch.device) -> None:
        """The backward is done."""
        if self._capture is not None:
            self._capture.backward_ended(device)
        if self.ranks.several and (name := self.prefix.learning_parameter()) is not None:
            # Nobody exchanges this gradient: with it, each rank would go its own way.
            self._learning = name
            self.prefix.drop_gradients()

    def end_batch(self) -> None:
        """A batch is done, whether or not an optimizer step came with it."""
        self.prefix.end_batch()
        if self._capture is not None:
            self._capture.stop()
        self.costs.add(self.prefix.depth, time.perf_counter() - self._began, evaluated=self._capture is not None)

    def forget_batch(self) -> None:
        """The batch that was begun last had no end; nothing happens if it had."""
        self.prefix.end_batch()
        if self._capture is not None:
            self._capture.stop()
        if self._passing is not None:
            self._passing.stop()
        self._capture = self._passing = None

    def end_step(self, step: int, learning_rate: float) -> FreezingEvent | None:
        """Optimizer step ``step`` is done; freezes or unfreezes if the policy says so.

        Args:
            step: optimizer steps done so far.
            learning_rate: that this step was done with.

        Returns:
            What changed. With several ranks, all must tell their strategy when the prefix has another version.
        """
        self._steps_per_batch = step - self._step_before  # more than one with several optimizers
        due = step >= self.next_evaluation
        capture, self._capture = self._capture, None
        decision = self._decide(step, learning_rate, due, capture) if self.ranks.leads else None
        if self.ranks.several:
            decision = self._agreed(decision, due)
        event = self._apply(step, decision)
        if event is None and self.prefix.count_step():
            self.ranks.share_buffers(self.prefix, self.prefix.depth)
            self.prefix.settle()
        if due:
            self.next_evaluation = step + self.evaluate_every_n_steps
        if due and self.ranks.leads:
            with self.costs.evaluating():
                # Asked before, it may be void by now; nobody would wait for it, and its worker would not be free.
                if self.evaluations.wait_s:
                    self._ask(capture)
                self.refresh_reference()
        return event

    def _decide(self, step: int, learning_rate: float, due: bool, capture: StepCapture | None) -> Decision | None:
        self.plasticity = None
        if self._gave_up:
            return None
        if (name := self._learning or self.prefix.learning_parameter()) is not None:
            return self._give_up(name)
        self.plasticity = self.evaluations.collect(due)
        if due and not self.evaluations.wait_s:
            with self.costs.evaluating():
                self._ask(capture)
            if self.plasticity is None:  # where the reference runs in this thread, the answer is there at once
                self.plasticity = self.evaluations.collect(due=False)
        # One is late whenever a new snapshot has to be worked on first.
        if self._adapt and self.evaluations.late_in_a_row >= 2:
            self._evaluate_half_as_often()
        loss = self._mean_loss() if due else None
        told = self.plasticity and self.prefix.chain.of_prefixes(self.plasticity, self.prefix.depth)
        decision = self.policy.observe(step, told, learning_rate, loss)
        if self.plasticity is not None:
            slopes = [math.nan] * self.prefix.depth + list(getattr(self.policy, "slopes", ()))[self.prefix.depth :]
            self.last_evaluation = LastEvaluation(step, self.plasticity, tuple(slopes))
        return decision

    def _agreed(self, decision: Decision | None, due: bool) -> Decision | None:
        """What the first rank decides, at the next evaluation step, or the depth as it is."""
        self._wanted = decision if decision is not None else self._wanted
        if not due:
            return None
        decision, self._wanted = self._wanted, None
        depth, reason = (decision.depth, decision.reason) if decision is not None else (self.prefix.depth, "")
        word = self.ranks.agree(Word(depth, self.evaluate_every_n_steps, reason))
        self.evaluate_every_n_steps = word.evaluate_every_n_steps
        return Decision(word.depth, word.reason)

    def _apply(self, step: int, decision: Decision | None) -> FreezingEvent | None:
        if decision is None or decision.depth == self.prefix.depth:
            return None
        kind = "freeze" if decision.depth > self.prefix.depth else "unfreeze"
        if kind == "freeze":
            self.ranks.share_buffers(self.prefix, decision.depth)
        self.prefix.set_depth(decision.depth)
        return FreezingEvent(step, kind, decision.depth, decision.reason)

    def close(self) -> None:
        """Leave the model as the user made it, with nothing frozen, and end the workers. Safe to call twice."""
        self.forget_batch()
        self.evaluations.forget()
        self._prefix_at_end = self._prefix_at_end or self.prefix.state_dict()
        self.prefix.set_depth(0)

    def state_dict(self, with_reference: bool) -> dict[str, Any]:
        """Plain types and tensors only; the policy's state is not in it.

        Args:
            with_reference: also keep the weights of the reference, and wait for the evaluations under way.
        """
        return {
            **self.evaluations.state_dict(with_answers=with_reference),
            "prefix": self._prefix_at_end or self.prefix.state_dict(),
            "next_evaluation": self.next_evaluation,
            "evaluate_every_n_steps": self.evaluate_every_n_steps,
            "reference_age": self.reference_age,
            "loss_sum": None if self._loss_sum is None else float(self._loss_sum),
            "loss_count": self._loss_count,
            "snapshot_due": self._snapshot_due,
            "reference": self.pool.snapshot_tensors() if with_reference else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, the prefix too.

        Raises:
            CheckpointError: the weights of the reference do not fit the model.
        """
        self.prefix.load_state_dict(state["prefix"])
        self.next_evaluation = state["next_evaluation"]
        if self._adapt:
            self.evaluate_every_n_steps = state["evaluate_every_n_steps"]
        self.reference_age = state["reference_age"]
        self._loss_sum = None if state["loss_sum"] is None else torch.tensor(state["loss_sum"])
        self._loss_count = state["loss_count"]
        self.evaluations.load_state_dict(state, with_answers=self.ranks.leads)
        if not self.ranks.leads:
            return
        self._snapshot_due = state["snapshot_due"]
        if state["reference"] is not None:
            self.pool.restore_snapshot(self.prefix.module, state["reference"])

    def _wants_reference(self) -> bool:
        return self.ranks.leads and self.policy.wants_reference and not self.evaluations.stopped

    def _ask(self, capture: StepCapture | None) -> None:
        if self.pool.has_snapshot and self._wants_reference():
            self.evaluations.send(capture)
        else:
            self.evaluations.skip()

    def _evaluate_half_as_often(self) -> None:
        self.evaluations.late_in_a_row = 0
        self.evaluate_every_n_steps *= 2
        every = f"which now is {self.evaluate_every_n_steps} steps"
        text = f"the reference needed longer than the interval between two evaluations, {every}"
        self.messages.append((logging.INFO, text))

    def _give_up(self, name: str) -> Decision:
        """Something else decides what learns here: leave it to it."""
        self._gave_up = True
        self.forget_batch()
        self.evaluations.stop()
        reason = f"the frozen parameter {name!r} was given a gradient: other code switches requires_grad on and off"
        self.messages.append((logging.WARNING, f"{reason}. All is unfrozen, and nothing will freeze any longer"))
        return Decision(0, reason)

    def _mean_loss(self) -> float | None:
        if self._loss_sum is None:
            return None
        mean = float(self._loss_sum) / self._loss_count
        self._loss_sum, self._loss_count = None, 0
        return mean
