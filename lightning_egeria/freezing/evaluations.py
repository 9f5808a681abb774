"""The evaluations under way: what the reference is asked, and what becomes of its answers."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.capture import StepCapture
from lightning_egeria.freezing.costs import StepCosts
from lightning_egeria.freezing.pool import ReferencePool
from lightning_egeria.freezing.reference import Comparison
from lightning_egeria.layers import FrozenPrefix

FAILURES_TO_STOP = 3  # in a row


@dataclasses.dataclass
class EvaluationCounts:
    """What became of the evaluations.

    Attributes:
        done: the policy saw them.
        late: the reference had not answered when the answer was due.
        dropped: all others that came to nothing: no worker was free, the prefix had changed, the batch was smaller.
        failed: the reference raised, or its process ended.
    """

    done: int = 0
    late: int = 0
    dropped: int = 0
    failed: int = 0


class Evaluations:
    """Gives observed steps to the reference, and takes its answers in the order of the evaluation steps.

    An answer that is not there when as many evaluation steps have gone by as there are workers, or that was asked at
    another prefix version, is dropped and counted.

    Args:
        prefix: the frozen prefix of the model in training.
        pool: of the reference models.
        costs: of the run's steps; told what the layer modules take.
        samples: how many samples of a batch are compared at most.
        in_flight: how many evaluations may be under way; as many as there are workers.
        wait_s: seconds to wait for an answer that is due; 0: do not wait.

    Attributes:
        counts: of the evaluations so far.
        late_in_a_row: answers that were late, since the last one that was not.
        precision: of the reference that answered last; None before.
        stopped: whether the reference is asked nothing any longer.
        messages: what the user should be told, as logging levels and texts; whoever tells it removes it.
    """

    def __init__(
        self, prefix: FrozenPrefix, pool: ReferencePool, costs: StepCosts, samples: int, in_flight: int, wait_s: float
    ) -> None:
        self.prefix = prefix
        self.pool = pool
        self.costs = costs
        self.wait_s = wait_s
        self.counts = EvaluationCounts()
        self.late_in_a_row = 0
        self.precision: str | None = None
        self.stopped = False
        self.messages: list[tuple[int, str]] = []
        self._samples = samples
        self._in_flight = in_flight
        self._crops = False
        self._compared_samples: int | None = None
        self._failures = 0
        self._nothing_in_a_row, self._told_of_nothing = 0, False
        # One entry per evaluation step; None where there was nothing to evaluate.
        self._pending: collections.deque[StepCapture | None] = collections.deque()
        self._overdue: list[Future[Comparison]] = []

    def capture(self) -> StepCapture:
        """What observes a step, to be given to `send` after it."""
        return StepCapture(self.prefix, self._samples, self._crops)

    def skip(self) -> None:
        """An evaluation step at which nothing is to be asked."""
        self._pending.append(None)

    def send(self, capture: StepCapture | None) -> None:
        """Ask about the evaluation step that was observed; None if it could not be."""
        sent = None
        if capture is not None and capture.version == self.prefix.version:
            weights = capture.weights.weights if capture.weights is not None else None
            try:
                evaluation = capture.evaluation()
                capture.answer = self.pool.submit(evaluation, weights) if evaluation is not None else None
            except Exception as error:  # keeping and packing run the user's own code, which may raise anything
                self.failed(f"{type(error).__name__}: {error}")
            sent = capture if capture.answer is not None else None
        self.counts.dropped += sent is None
        self._pending.append(sent)

    def collect(self, due: bool) -> tuple[float, ...] | None:
        """The plasticity that the oldest evaluation under way tells; None if it tells nothing, or not yet.

        Args:
            due: whether this is an evaluation step, at which the answer must be there.
        """
        answered = [answer for answer in self._overdue if answer.done()]
        self._overdue = [answer for answer in self._overdue if answer not in answered]
        for late in answered:
            if (error := late.exception()) is not None:
                self.failed(str(error))
        if not (due and len(self._pending) >= self._in_flight) and not self._answered():
            return None
        capture = self._pending.popleft()
        if capture is None or capture.answer is None:
            return None
        if not capture.answer.done() and not self.wait_s:
            self._overdue.append(capture.answer)
            self.counts.late += 1
            self.late_in_a_row += 1
            return None
        try:
            answer = capture.answer.result(self.wait_s)
        except NoAnswer:
            self.failed(f"it did not answer within {self.wait_s:g} s")
            return None
        except Exception as error:  # in this thread the user's modules may raise anything
            self.failed(str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}")
            return None
        self._failures = self.late_in_a_row = 0
        self._take_costs(capture)
        if answer.precision != self.precision:
            text = f"the reference model runs in {answer.precision}: {answer.reason}"
            self.messages.append((logging.INFO, text))
        self._crops, self.precision = answer.crops, answer.precision
        return self._comparable(answer)

    def failed(self, reason: str) -> None:
        """Count a failure; after some in a row, nothing is asked any longer."""
        self.counts.failed += 1
        self._failures += 1
        if self.counts.failed == 1:
            self.messages.append((logging.WARNING, f"the reference model failed: {reason}. Training goes on"))
        if self._failures == FAILURES_TO_STOP:
            self.stop()
            text = f"the reference model failed {FAILURES_TO_STOP} times in a row, the last time with: {reason}"
            self.messages.append((logging.WARNING, f"{text}. Training goes on; no more layer modules will freeze"))

    def void(self) -> None:
        """What is under way says nothing any longer; the places in the queue stay."""
        self.counts.dropped += sum(capture is not None for capture in self._pending)
        self._pending = collections.deque(None for _ in self._pending)

    def forget(self) -> None:
        """Nothing is under way any longer, and there is no reference."""
        self._pending.clear()
        self._overdue.clear()
        self.pool.drop_snapshot()

    def stop(self) -> None:
        """Ask nothing from here on."""
        self.stopped = True
        self.forget()

    def state_dict(self, with_answers: bool) -> dict[str, Any]:
        """Plain types only.

        Args:
            with_answers: wait for the evaluations under way, and keep what they say.
        """
        pending = [None if not with_answers or c is None else self._waited(c) for c in self._pending]
        return {
            "precision": self.precision,
            "crops": self._crops,
            "compared_samples": self._compared_samples,
            "counts": vars(self.counts).copy(),
            "pending": [None if answer is None else vars(answer) for answer in pending],
        }

    def load_state_dict(self, state: dict[str, Any], with_answers: bool) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: what it gave.
            with_answers: whether this is the process that asks.
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
        """Whether the oldest evaluation under way is done; where answers are waited for, that must not matter."""
        oldest = self._pending[0] if self._pending and not self.wait_s else None
        return oldest is not None and oldest.answer is not None and oldest.answer.done()

    def _waited(self, capture: StepCapture) -> Comparison | None:
        if capture.answer is None:
            return None
        try:
            return capture.answer.result(self.wait_s)
        except Exception:  # it fails again, and is told of, where the answer is due
            return None

    def _comparable(self, answer: Comparison) -> tuple[float, ...] | None:
        """The plasticity, unless it says nothing.

        Where batches differ in size, so does the noise of what is measured on them.
        """
        if self._compared_samples is None:
            self._compared_samples = answer.samples
        active = range(self.prefix.depth, len(answer.plasticity))
        unmeasured = next((index for index in active if not math.isfinite(answer.plasticity[index])), None)
        if unmeasured is not None:
            self._said_nothing(unmeasured, answer.samples)
        if answer.samples != self._compared_samples or unmeasured is not None:
            self.counts.dropped += 1
            return None
        self.counts.done += 1
        self._nothing_in_a_row = 0
        return answer.plasticity

    def _said_nothing(self, index: int, samples: int) -> None:
        self._nothing_in_a_row += 1
        if self._nothing_in_a_row == FAILURES_TO_STOP and not self._told_of_nothing:
            self._told_of_nothing = True
            name = self.prefix.chain.layer_modules[index].name
            reason = f"what {name!r} gives is not finite, or the same for every sample"
            if samples == 1:
                reason = "a batch of one sample has none that it could be like"
            text = f"{FAILURES_TO_STOP} evaluations in a row said nothing: {reason}; while that is so, nothing freezes"
            self.messages.append((logging.WARNING, text))

    def _take_costs(self, capture: StepCapture) -> None:
        if not capture.timer.timed:
            return
        shares = capture.timer.layer_seconds() if self.prefix.depth == 0 else None
        if shares is not None:
            self.costs.add_layer_seconds(shares)
