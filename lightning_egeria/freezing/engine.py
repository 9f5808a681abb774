"""From the steps of a training run to freezing decisions, without a trainer."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from concurrent.futures import Executor, Future
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_egeria.freezing.costs import StepCosts, TimedBoundaryRecorder, mark
from lightning_egeria.freezing.policy import Policy
from lightning_egeria.freezing.reference import NetworkCall, ReferenceModel
from lightning_egeria.freezing.similarity import gram_distance
from lightning_egeria.layers import FrozenPrefix
from lightning_egeria.tracing import Forward, ForwardReplacements, tensor_leaves


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


@dataclasses.dataclass
class _Capture:
    """One evaluation on its way: what the training step showed, and later the reference's answer."""

    version: int
    recorder: TimedBoundaryRecorder
    calls: list[NetworkCall]
    replacements: ForwardReplacements
    answer: Future[list[Tensor | None]] | None = None


class FreezingEngine:
    """Captures boundary activations, has the reference run on the same inputs, and asks the policy.

    Call `begin_step`, `end_forward`, `end_backward` and `end_step` in this order around each training step. What the
    evaluation of one evaluation step says is applied at the next one; an answer that is late by then, or that was
    asked at another prefix version, is dropped and counted.

    Args:
        prefix: the frozen prefix of the model in training.
        policy: decides; `Policy.start` must have been called.
        executor: runs the reference model. `InlineExecutor` runs it in the training thread.
        evaluate_every_n_steps: optimizer steps from one evaluation to the next.
        refresh_every_n_evaluations: evaluations after which the reference takes over the weights again.
        evaluation_samples: how many samples of a batch are compared at most.
        step: optimizer steps done before.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        policy: Policy,
        executor: Executor,
        evaluate_every_n_steps: int,
        refresh_every_n_evaluations: int,
        evaluation_samples: int,
        step: int = 0,
    ) -> None:
        self.prefix = prefix
        self.policy = policy
        self.costs = StepCosts()
        self.evaluations_done = 0
        self.evaluations_dropped = 0
        self.failure: BaseException | None = None
        self._executor = executor
        self._every = evaluate_every_n_steps
        self._refresh_every = refresh_every_n_evaluations
        self._samples = evaluation_samples
        self.next_evaluation = step + evaluate_every_n_steps
        self._reference: ReferenceModel | None = None
        self._reference_age = 0
        self._compared_samples: int | None = None
        self._capture: _Capture | None = None
        self._pending: _Capture | None = None
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._began = 0.0
        prefix.listeners.append(self)

    def prefix_changed(self, prefix: FrozenPrefix) -> None:
        """An evaluation of the prefix before says nothing of the one after."""
        if self._pending is not None and self._pending.version != prefix.version:
            self._pending = None
            self.evaluations_dropped += 1

    def begin_step(self, step: int) -> None:
        """The forward of optimizer step ``step + 1`` is about to run (or, in an accumulation window, a part of it)."""
        self._began = time.perf_counter()
        self.prefix.assert_modes()
        due = step + 1 >= self.next_evaluation
        if due and self._reference is not None and self._capture is None and self.policy.wants_reference:
            self._capture = self._start_capture()

    def end_forward(self, loss: Tensor) -> None:
        """The forward is done and gave ``loss``; its backward comes now."""
        value = loss.detach()
        self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
        self._loss_count += 1
        if self._capture is not None:
            self._stop_recording(self._capture)

    def end_backward(self, device: torch.device) -> None:
        """The backward is done."""
        if self._capture is not None and self._capture.recorder.backward_ended is None:
            self._capture.recorder.backward_ended = mark(device)

    def end_batch(self) -> None:
        """A batch is done, whether or not an optimizer step came with it."""
        if self._capture is not None:
            self._stop_recording(self._capture)
        self.costs.add(self.prefix.depth, time.perf_counter() - self._began, evaluated=self._capture is not None)

    def end_step(self, step: int, learning_rate: float) -> FreezingEvent | None:
        """Optimizer step ``step`` is done; freezes or unfreezes if the policy says so.

        Args:
            step: optimizer steps done so far.
            learning_rate: that this step was done with.
        """
        due = step >= self.next_evaluation
        plasticity = self._collect() if due else None
        loss = self._mean_loss() if due else None
        decision = self.policy.observe(step, plasticity, learning_rate, loss)
        capture, self._capture = self._capture, None
        event = None
        if decision is not None and decision.depth != self.prefix.depth:
            kind = "freeze" if decision.depth > self.prefix.depth else "unfreeze"
            self.prefix.set_depth(decision.depth)
            event = FreezingEvent(step, kind, decision.depth, decision.reason)
        if due:
            started = time.perf_counter()
            self.next_evaluation = step + self._every
            if capture is not None:
                self._dispatch(capture)
            self._refresh_reference()
            self.costs.evaluation_seconds += time.perf_counter() - started
        return event

    def close(self) -> None:
        """Leave the model as the user made it, with nothing frozen. Safe to call twice."""
        if self._capture is not None:
            self._stop_recording(self._capture)
        self._capture = self._pending = self._reference = None
        self.prefix.set_depth(0)

    def _start_capture(self) -> _Capture:
        module, chain = self.prefix.module, self.prefix.chain
        modules = dict(module.named_modules())
        recorder = TimedBoundaryRecorder(modules, chain, self._samples, first=self.prefix.depth)
        capture = _Capture(self.prefix.version, recorder, [], ForwardReplacements())
        for entry in chain.entries:
            capture.replacements.replace(modules[entry], functools.partial(_record_call, entry, capture))
        recorder.start()
        return capture

    def _stop_recording(self, capture: _Capture) -> None:
        capture.recorder.stop()
        capture.replacements.restore()

    def _dispatch(self, capture: _Capture) -> None:
        if capture.version != self.prefix.version or self._reference is None or not capture.calls:
            self.evaluations_dropped += 1
            return
        self.costs.evaluation_seconds += capture.recorder.gram_seconds()
        shares = capture.recorder.layer_seconds() if self.prefix.depth == 0 else None
        if shares is not None:
            self.costs.add_layer_seconds(shares)
        capture.answer = self._executor.submit(self._reference.boundary_grams, capture.calls)
        capture.calls = []
        self._pending = capture

    def _collect(self) -> list[float] | None:
        pending, self._pending = self._pending, None
        if pending is None or pending.answer is None:
            return None
        if not pending.answer.done():
            self.evaluations_dropped += 1
            return None
        error = pending.answer.exception()
        if error is not None:
            self.failure = error
            return None
        return self._plasticity(pending.recorder.grams, pending.answer.result())

    def _plasticity(self, grams: list[Tensor | None], reference: list[Tensor | None]) -> list[float] | None:
        pairs = [
            (a, b) if a is not None and b is not None and a.shape == b.shape else None
            for a, b in zip(grams, reference, strict=True)
        ]
        sizes = {pair[0].shape[0] for pair in pairs[self.prefix.depth :] if pair is not None}
        if self._compared_samples is None and sizes:
            self._compared_samples = max(sizes)
        # The loss depends on the number of samples: a smaller last batch would look like a change of plasticity. One
        # sample is always as similar to itself as before: its loss of zero would look like convergence.
        if sizes != {self._compared_samples} or sizes == {1} or None in pairs[self.prefix.depth :]:
            self.evaluations_dropped += 1
            return None
        self.evaluations_done += 1
        return [math.nan if pair is None else float(gram_distance(*pair)) for pair in pairs]

    def _refresh_reference(self) -> None:
        if self.failure is not None or not self.policy.wants_reference:
            self._reference = None
            return
        self._reference_age += 1
        if self._reference is None:
            try:
                self._reference = ReferenceModel(self.prefix.module, self.prefix.chain, self._samples)
            except Exception as error:  # copying runs the user's own code, which may raise anything
                self.failure = error
            self._reference_age = 0
        elif self._reference_age >= self._refresh_every:
            self._reference.refresh(self.prefix.module)
            self._reference_age = 0

    def _mean_loss(self) -> float | None:
        if self._loss_sum is None:
            return None
        mean = float(self._loss_sum) / self._loss_count
        self._loss_sum, self._loss_count = None, 0
        return mean


def _record_call(entry: str, capture: _Capture, original: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        made = {id(leaf) for call in capture.calls for leaf in tensor_leaves(call.output)}

        def keep(tensor: Tensor) -> Tensor:
            # Cloned, because the network may change its input in place; another call's output must stay recognisable.
            return tensor if id(tensor) in made else tensor.detach().clone()

        kept_args, kept_kwargs = apply_to_collection((args, kwargs), Tensor, keep)
        if capture.recorder.began is None:
            leaf = next(tensor_leaves((args, kwargs)), None)
            capture.recorder.began = mark(leaf.device if leaf is not None else torch.device("cpu"))
        output = original(*args, **kwargs)
        capture.calls.append(NetworkCall(entry, kept_args, kept_kwargs, output))
        return output

    return forward
