"""Pending evaluations: sending steps to the reference, and collecting its answers."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.capture import StepCapture
from lightning_egeria.freezing.reference import Comparison
from lightning_egeria.freezing.runner import ReferenceRunner
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.profiling.costs import StepCosts
from lightning_egeria.training.notices import Notices

FAILURES_TO_STOP = 3  # in a row
LATE_TO_TELL = 4  # evaluations without an answer, with none before
MANY_SMALLER = 3  # evaluations of smaller batches, before a warning


@dataclasses.dataclass
class EvaluationCounts:
    """Number of evaluations by outcome.

    Attributes:
        done: the policy saw the result.
        late: the reference had not answered when the answer was due.
        dropped: the worker was busy, the prefix had changed, the batch was smaller, or the result was not finite.
        failed: the reference raised, or its process ended.
    """

    done: int = 0
    late: int = 0
    dropped: int = 0
    failed: int = 0


class Evaluations:
    """Sends captured steps to the reference, and collects its answers in the order of the evaluation steps.

    It drops and counts an answer that is late at the next evaluation step, or belongs to an earlier prefix. It also
    drops an answer about a batch smaller than others, such as the last one of an epoch, because it is noisier.

    Args:
        prefix: frozen prefix of the model in training.
        runner: runs the reference model.
        costs: step costs of the run; takes the times of the layer modules.
        samples: samples of a batch to compare, at most.
        wait_s: seconds to wait for an answer that is due; 0 does not wait.
        notices: takes log lines and warnings.

    Attributes:
        counts: number of evaluations so far, by outcome.
        late_in_a_row: number of late answers since the last one in time.
        precision: precision of the reference at its latest answer; None before the first.
        stopped: whether evaluations have stopped for good.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        runner: ReferenceRunner,
        costs: StepCosts,
        samples: int,
        wait_s: float,
        notices: Notices,
    ) -> None:
        self.prefix = prefix
        self.runner = runner
        self.costs = costs
        self.wait_s = wait_s
        self.counts = EvaluationCounts()
        self.late_in_a_row = 0
        self.precision: str | None = None
        self.stopped = False
        self._notices = notices
        self._samples = samples
        self._crops = False
        self._compared_samples: int | None = None
        self._failures = 0
        self._nothing_in_a_row = 0
        self._smaller = 0  # answers about a smaller batch
        # One entry per evaluation step; None where there was nothing to evaluate.
        self._pending: collections.deque[StepCapture | None] = collections.deque()
        self._overdue: list[Future[Comparison]] = []

    def capture(self) -> StepCapture:
        """Return a capture for one step, to pass to `send` after the step."""
        return StepCapture(self.prefix, self._samples, self._crops)

    def skip(self) -> None:
        """Count an evaluation step without an evaluation."""
        self._pending.append(None)

    def send(self, capture: StepCapture | None) -> None:
        """Send a captured step to the reference; None if the step could not be captured."""
        sent = None
        if capture is not None and capture.version == self.prefix.version:
            weights = capture.weights.weights if capture.weights is not None else None
            try:
                evaluation = capture.evaluation()
                capture.answer = self.runner.submit(evaluation, weights) if evaluation is not None else None
            except Exception as error:  # copying and packing run the user's code, which may raise anything
                self.failed(f"{type(error).__name__}: {error}")
            sent = capture if capture.answer is not None else None
        self.counts.dropped += sent is None
        self._pending.append(sent)

    def collect(self, due: bool) -> tuple[float, ...] | None:
        """Return the plasticity from the oldest pending evaluation; None without an answer or a finite result.

        Args:
            due: whether this is an evaluation step, at which the answer is due.
        """
        answered = [answer for answer in self._overdue if answer.done()]
        self._overdue = [answer for answer in self._overdue if answer not in answered]
        for late in answered:
            if (error := late.exception()) is not None:
                self.failed(str(error))
        if not (due and self._pending) and not self._answered():
            return None
        capture = self._pending.popleft()
        if capture is None or capture.answer is None:
            return None
        if not capture.answer.done() and not self.wait_s:
            self._overdue.append(capture.answer)
            self.counts.late += 1
            self.late_in_a_row += 1
            if self.counts.late == LATE_TO_TELL and not self.counts.done:
                self._notices.warn(
                    f"none of the first {LATE_TO_TELL} evaluations was answered in time, and without them nothing "
                    "freezes. Other processes use the cores, or steps are very short: set background=False, or raise "
                    "evaluate_every_n_steps"
                )
            return None
        try:
            answer = capture.answer.result(self.wait_s)
        except NoAnswer:
            self.failed(f"no answer within {self.wait_s:g} s")
            return None
        except Exception as error:  # in this thread the user's modules may raise anything
            self.failed(str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}")
            return None
        self._failures = self.late_in_a_row = 0
        self._take_costs(capture)
        if answer.precision != self.precision:
            self._notices.inform(f"the reference model runs in {answer.precision}: {answer.reason}")
        if answer.differs:
            self._notices.warn(
                "the reference process does not run the network as this process does: with the same weights and input, "
                f"outputs differ by up to {answer.differs:.0%} of the largest value. Forward reads a global, or "
                "a setting of a Python module, that has changed since it was imported; the process has its own copy. "
                "Set background=False to run the reference in the training thread",
                once="other outputs",
            )
        self._crops, self.precision = answer.crops, answer.precision
        return self._comparable(answer)

    def failed(self, reason: str) -> None:
        """Count a failure, and stop after `FAILURES_TO_STOP` in a row."""
        self.counts.failed += 1
        self._failures += 1
        if self.counts.failed == 1:
            self._notices.warn(f"the reference model failed: {reason}. Training continues")
        if self._failures == FAILURES_TO_STOP:
            self.stop()
            self._notices.warn(
                f"the reference model failed {FAILURES_TO_STOP} times in a row, last with: {reason}. Training "
                "continues; no more layer modules will freeze"
            )

    def void(self) -> None:
        """Drop the answers of pending evaluations, and keep their places in the queue."""
        self.counts.dropped += sum(capture is not None for capture in self._pending)
        self._pending = collections.deque(None for _ in self._pending)

    def forget(self) -> None:
        """Drop pending evaluations and the reference."""
        self._pending.clear()
        self._overdue.clear()
        self.runner.drop_snapshot()

    def stop(self) -> None:
        """Stop evaluating for good."""
        self.stopped = True
        self.forget()

    def state_dict(self, with_answers: bool) -> dict[str, Any]:
        """Return the state in plain types.

        Args:
            with_answers: wait for pending evaluations, and store their answers.
        """
        pending = [None if not with_answers or c is None else self._waited(c) for c in self._pending]
        return {
            "precision": self.precision,
            "crops": self._crops,
            "compared_samples": self._compared_samples,
            "counts": vars(self.counts).copy(),
            "pending": [None if answer is None else vars(answer) for answer in pending],
        }

    def load_state_dict(self, state: Mapping[str, Any], with_answers: bool) -> None:
        """Restore the state of `state_dict`.

        Args:
            state: output of `state_dict`.
            with_answers: restore the stored answers too; only on the rank that compares.
        """
        self.precision = state["precision"]
        self._crops = state["crops"]
        self._compared_samples = state["compared_samples"]
        self.counts = EvaluationCounts(**state["counts"])
        for answer in state["pending"] if with_answers else ():
            capture = None
            if answer is not None:
                capture = self.capture()
                capture.answer = Future()
                capture.answer.set_result(Comparison(**{**answer, "plasticity": tuple(answer["plasticity"])}))
            self._pending.append(capture)

    def _answered(self) -> bool:
        """Whether the oldest pending evaluation is done; always False with ``wait_s``, where timing must not matter."""
        oldest = self._pending[0] if self._pending and not self.wait_s else None
        return oldest is not None and oldest.answer is not None and oldest.answer.done()

    def _waited(self, capture: StepCapture) -> Comparison | None:
        if capture.answer is None:
            return None
        try:
            return capture.answer.result(self.wait_s)
        except Exception:  # `collect` raises it again and reports it
            return None

    def _comparable(self, answer: Comparison) -> tuple[float, ...] | None:
        """Return the plasticity; None if it is not finite, or from a smaller batch, which is noisier."""
        self._compared_samples = max(answer.samples, self._compared_samples or 0)
        active = range(self.prefix.depth, len(answer.plasticity))
        unmeasured = next((index for index in active if not math.isfinite(answer.plasticity[index])), None)
        if unmeasured is not None:
            self._had_no_result(unmeasured, answer.samples)
        smaller = answer.samples < self._compared_samples
        if smaller or unmeasured is not None:
            self.counts.dropped += 1
            self._smaller += smaller
            if smaller and self._smaller >= MANY_SMALLER and self._smaller > self.counts.done:
                self._notices.warn(
                    f"{self._smaller} of {self._smaller + self.counts.done} evaluations were dropped because their "
                    f"batch has fewer than {self._compared_samples} samples. Use drop_last=True, or a smaller "
                    "evaluation_samples",
                    once="smaller batches",
                )
            return None
        self.counts.done += 1
        self._nothing_in_a_row = 0
        return answer.plasticity

    def _had_no_result(self, index: int, samples: int) -> None:
        self._nothing_in_a_row += 1
        if self._nothing_in_a_row == FAILURES_TO_STOP:
            name = self.prefix.chain.layer_modules[index].name
            reason = f"the output of {name!r} is not finite, or is the same for every sample"
            if samples == 1:
                reason = "plasticity needs at least 2 samples per batch, got 1"
            self._notices.warn(
                f"{FAILURES_TO_STOP} evaluations in a row had no result: {reason}. Nothing freezes until that changes",
                once="no result",
            )

    def _take_costs(self, capture: StepCapture) -> None:
        if not capture.timer.timed:
            return
        shares = capture.timer.layer_seconds() if self.prefix.depth == 0 else None
        if shares is not None:
            self.costs.add_layer_seconds(shares)
