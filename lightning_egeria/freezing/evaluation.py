"""The life of an evaluation, from the captured training step to the plasticity that the policy sees.

`EvaluationQueue` owns every evaluation of a run: the step being captured, the future of each answer, and their order.
At most one step is being captured. Each evaluation step appends one place to the queue and takes one from it.

    capture()         send()              reference answers      collect()
    ---------> CAPTURED -------------> SENT --------------> ANSWERED --------> done
                  |                      |                      |
                  | abort(): gone        | void(): dropped      | a batch smaller than others, or no finite
                  |                      |                      | value: dropped
                  | reference busy,      | no answer at the     |
                  | other prefix, or     | next evaluation      | the reference raised, or its process ended,
                  | network not called:  | step: late           | or did not answer in time: failed
                  | dropped              |                      |

``done``, ``late``, ``dropped`` and ``failed`` are final, and `EvaluationCounts` counts them. Without ``wait_s``,
`collect` takes an answer after the first step that finds one. With it, `collect` waits for the answer at the next
evaluation step, so that the decision does not depend on timing; then no answer is late.

`ReferenceComparison` says when each of these calls is due.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

import torch
from torch import Tensor

from lightning_egeria.core.distributed.gathering import GatheredWeights
from lightning_egeria.core.network.calls import CallRecorder
from lightning_egeria.core.network.compilation import eager
from lightning_egeria.core.network.prefix import FrozenPrefix
from lightning_egeria.core.network.sharding import holds_shards
from lightning_egeria.core.profiling.clock import mark
from lightning_egeria.core.profiling.costs import BoundaryTimer, StepCosts
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.reference import EvaluationRequest, EvaluationResult
from lightning_egeria.freezing.runner import ReferenceRunner

FAILURES_TO_STOP = 3  # in a row
MANY_SMALLER = 3  # evaluations of smaller batches, before a warning


class StepCapture:
    """Captures one training step between `start` and `stop`: the inputs of the network, and the times at boundaries.

    Args:
        prefix: frozen prefix of the model in training; its layer modules are not captured.
        samples: largest number of samples to compare.
        crop: whether to keep these samples only.

    Attributes:
        version: version of the prefix in this step.
        timer: times at which forward and backward passed the boundaries.
        weights: weights that FSDP2 gathered in this step; None without FSDP2.
    """

    def __init__(self, prefix: FrozenPrefix, samples: int, crop: bool) -> None:
        self.version = prefix.version
        modules = dict(prefix.module.named_modules())
        self.timer = BoundaryTimer(modules, prefix.chain, first=prefix.depth)
        self.weights = GatheredWeights(prefix.module) if holds_shards(prefix.module) else None
        self._first = prefix.depth
        self._network = {path: modules[path] for path in prefix.chain.entries}
        self._samples = samples
        self._crop = crop
        self._batch_size: int | None = None
        self._device = torch.device("cpu")
        self._calls = CallRecorder(modules, prefix.chain.entries, self._keep, self._entered)
        self._uncompiled = contextlib.ExitStack()

    def start(self) -> None:
        """Start capturing."""
        self._uncompiled.enter_context(eager())
        self._calls.start()
        self.timer.start()
        if self.weights is not None:
            self.weights.start()

    def stop(self) -> None:
        """Restore the modules. Safe to call twice."""
        if self.weights is not None:
            self.weights.stop()
        self.timer.stop()
        self._calls.stop()
        self._uncompiled.close()

    def backward_ended(self) -> None:
        """Mark the end of the backward pass; only the first call counts."""
        if self.timer.backward_ended is None:
            self.timer.backward_ended = mark(self._device)

    def request(self) -> EvaluationRequest | None:
        """Return the request for the reference; None if the step did not call the network.

        Raises:
            Exception: if copying an argument failed, as a user's class may.
        """
        calls = self._calls.calls
        return EvaluationRequest(calls, self._network, self._first) if calls else None

    def _entered(self, first: Tensor | None) -> None:
        self._device = first.device if first is not None else self._device
        self.timer.began = mark(self._device)
        self._batch_size = first.shape[0] if first is not None and first.ndim else None

    def _keep(self, tensor: Tensor) -> Tensor:
        """Copy a tensor, because the network may change its input in place."""
        if self._crop and tensor.ndim and tensor.shape[0] == self._batch_size:
            tensor = tensor[: self._samples]
        return tensor.detach().clone()


@dataclasses.dataclass
class EvaluationCounts:
    """Number of evaluations by outcome.

    Attributes:
        done: the policy saw the result.
        late: the reference had not answered by the next evaluation step.
        dropped: the reference was busy, the prefix had changed, the batch was smaller, or the result was not finite.
        failed: the reference raised, or its process ended.
    """

    done: int = 0
    late: int = 0
    dropped: int = 0
    failed: int = 0


@dataclasses.dataclass(frozen=True)
class _Sent:
    """An evaluation that the reference works on, or has answered."""

    answer: Future[EvaluationResult]
    step: int  # optimizer step at which it was sent
    timer: BoundaryTimer | None  # of the captured step; None after a resume


class EvaluationQueue:
    """Captures steps, sends them to the reference, and collects the answers in order.

    Args:
        prefix: frozen prefix of the model in training.
        runner: runs the reference model.
        costs: step costs of the run; takes the times of the layer modules.
        samples: largest number of samples of a batch to compare.
        wait_s: seconds to wait for an answer that is due; 0 does not wait.
        notices: takes log lines and warnings.

    Attributes:
        counts: number of evaluations so far, by outcome.
        unanswered_in_a_row: evaluation steps since the last answer in time at which an answer was late, or none was
            asked for because the reference was busy.
        late_steps: optimizer steps that the latest late answer took; None before the first.
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
        self.runner = runner
        self.wait_s = wait_s
        self.counts = EvaluationCounts()
        self.unanswered_in_a_row = 0
        self.late_steps: int | None = None
        self.precision: str | None = None
        self.stopped = False
        self._prefix = prefix
        self._costs = costs
        self._notices = notices
        self._samples = samples
        self._crops = False
        self._compared_samples: int | None = None
        self._failures = 0
        self._without_result = 0  # in a row
        self._smaller = 0  # answers about a smaller batch
        self._capture: StepCapture | None = None
        self._found_busy = False  # when the step was to be captured
        self._pending: collections.deque[_Sent | None] = collections.deque()  # None: nothing was sent
        self._late: list[_Sent] = []

    # --- the step ----------------------------------------------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        """Whether a step is captured that was not sent yet."""
        return self._capture is not None

    def capture(self) -> None:
        """Capture the step that begins now, unless one is captured, or the reference is busy and could not take it."""
        if self._capture is not None:
            return
        self._found_busy = not self.wait_s and not self.runner.ready()
        if not self._found_busy:
            self._capture = StepCapture(self._prefix, self._samples, self._crops)
            self._capture.start()

    def forward_ended(self) -> None:
        """Restore the modules of a captured step. Safe to call twice."""
        if self._capture is not None:
            self._capture.stop()

    def backward_ended(self) -> None:
        """Mark the end of the backward pass of a captured step."""
        if self._capture is not None:
            self._capture.backward_ended()

    def abort(self) -> None:
        """Drop the captured step, which has no end."""
        self.forward_ended()
        self._capture = None

    # --- the queue ---------------------------------------------------------------------------------------------------

    def send(self, step: int, compares: bool) -> None:
        """Send the captured step to the reference, and append its place to the queue.

        Args:
            step: number of optimizer steps so far.
            compares: whether there is a reference to compare with; if not, the place stays empty.
        """
        capture, self._capture = self._capture, None
        self._found_busy = False
        sent = self._sent(capture, step) if compares and capture is not None else None
        self._pending.append(sent)
        if compares and sent is None:
            self.counts.dropped += 1

    def _sent(self, capture: StepCapture, step: int) -> _Sent | None:
        if capture.version != self._prefix.version:
            return None
        weights = capture.weights.weights if capture.weights is not None else None
        try:
            request = capture.request()
            answer = self.runner.submit(request, weights) if request is not None else None
        except Exception as error:  # copying and packing run the user's code, which may raise anything
            self.failed(f"{type(error).__name__}: {error}")
            return None
        return _Sent(answer, step, capture.timer) if answer is not None else None

    def collect(self, step: int, due: bool) -> tuple[float, ...] | None:
        """Return the plasticity from the oldest pending evaluation; None without an answer or a finite result.

        Args:
            step: number of optimizer steps so far.
            due: whether this is an evaluation step, at which the answer is due.
        """
        self._look_at_late_answers(step)
        self.unanswered_in_a_row += due and self._found_busy
        if not (due and self._pending) and not self._oldest_is_answered():
            return None
        sent = self._pending.popleft()
        if sent is None:
            return None
        if not sent.answer.done() and not self.wait_s:
            self._late.append(sent)
            self.counts.late += 1
            self.unanswered_in_a_row += 1
            return None
        try:
            result = sent.answer.result(self.wait_s)
        except NoAnswer:
            self.failed(f"no answer within {self.wait_s:g} s")
            return None
        except Exception as error:  # in this thread the user's modules may raise anything
            self.failed(str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}")
            return None
        self._failures = self.unanswered_in_a_row = 0
        self._take_costs(sent.timer)
        self._tell_of(result)
        self._crops, self.precision = result.crops, result.precision
        return self._usable(result)

    def _look_at_late_answers(self, step: int) -> None:
        arrived = [sent for sent in self._late if sent.answer.done()]
        self._late = [sent for sent in self._late if sent not in arrived]
        for sent in arrived:
            self.late_steps = step - sent.step
            if (error := sent.answer.exception()) is not None:
                self.failed(str(error))

    def _oldest_is_answered(self) -> bool:
        """Whether the oldest pending evaluation has its answer; always False with ``wait_s``."""
        oldest = self._pending[0] if self._pending and not self.wait_s else None
        return oldest is not None and oldest.answer.done()

    def _take_costs(self, timer: BoundaryTimer | None) -> None:
        if timer is None or not timer.timed or self._prefix.depth:
            return
        seconds = timer.layer_seconds()
        if seconds is not None:
            self._costs.add_layer_seconds(seconds)

    def _tell_of(self, result: EvaluationResult) -> None:
        if result.precision != self.precision:
            self._notices.inform(f"the reference model runs in {result.precision}: {result.reason}")
        if result.differs:
            self._notices.warn(
                "the reference process does not run the network as this process does: with the same weights and input, "
                f"outputs differ by up to {result.differs:.0%} of the largest value. Forward reads a global, or "
                "a setting of a Python module, that has changed since it was imported; the process has its own copy. "
                "Set background=False to run the reference in the training thread",
                once="other outputs",
            )

    def _usable(self, result: EvaluationResult) -> tuple[float, ...] | None:
        """Return the plasticity; None if it is not finite, or from a smaller batch, which is noisier."""
        self._compared_samples = max(result.samples, self._compared_samples or 0)
        active = range(self._prefix.depth, len(result.plasticity))
        unmeasured = next((index for index in active if not math.isfinite(result.plasticity[index])), None)
        if unmeasured is not None:
            self._had_no_result(unmeasured, result.samples)
        smaller = result.samples < self._compared_samples
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
        self._without_result = 0
        return result.plasticity

    def _had_no_result(self, index: int, samples: int) -> None:
        self._without_result += 1
        if self._without_result == FAILURES_TO_STOP:
            name = self._prefix.chain.layer_modules[index].name
            reason = f"the output of {name!r} is not finite, or is the same for every sample"
            if samples == 1:
                reason = "plasticity needs at least 2 samples per batch, got 1"
            self._notices.warn(
                f"{FAILURES_TO_STOP} evaluations in a row had no result: {reason}. Nothing freezes until that changes",
                once="no result",
            )

    # --- what ends evaluations ---------------------------------------------------------------------------------------

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
        self.counts.dropped += sum(sent is not None for sent in self._pending)
        self._pending = collections.deque(None for _ in self._pending)

    def move_to_thread(self) -> None:
        """Run the same reference in the training thread from now on; drop what its process has not answered."""
        self.void()
        self._late.clear()
        try:
            self.runner.move_to_thread(self._prefix.module)
        except Exception as error:  # packing runs the user's code, which may raise anything
            self.failed(f"{type(error).__name__}: {error}")

    def forget(self) -> None:
        """Drop pending evaluations and the reference."""
        self._pending.clear()
        self._late.clear()
        self.runner.drop_snapshot()

    def stop(self) -> None:
        """Stop evaluating for good."""
        self.stopped = True
        self.forget()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, with_answers: bool) -> dict[str, Any]:
        """Return the state in plain types.

        Args:
            with_answers: wait for pending evaluations, and store their answers.
        """
        pending = [self._waited(sent) if with_answers and sent is not None else None for sent in self._pending]
        return {
            "precision": self.precision,
            "crops": self._crops,
            "compared_samples": self._compared_samples,
            "counts": vars(self.counts).copy(),
            "pending": [None if result is None else vars(result) for result in pending],
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
        for result in state["pending"] if with_answers else ():
            sent = None
            if result is not None:
                answer: Future[EvaluationResult] = Future()
                answer.set_result(EvaluationResult(**{**result, "plasticity": tuple(result["plasticity"])}))
                sent = _Sent(answer, 0, None)
            self._pending.append(sent)

    def _waited(self, sent: _Sent) -> EvaluationResult | None:
        try:
            return sent.answer.result(self.wait_s)
        except Exception:  # `collect` raises it again and reports it
            return None
