"""Capturing one training step: the inputs of the network, and the times at its boundaries."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

import torch
from torch import Tensor

from lightning_egeria.distributed.gathering import GatheredWeights
from lightning_egeria.freezing.reference import Comparison, Evaluation
from lightning_egeria.network.calls import CallRecorder
from lightning_egeria.network.compilation import eager
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.network.sharding import holds_shards
from lightning_egeria.profiling.clock import mark
from lightning_egeria.profiling.costs import BoundaryTimer


class StepCapture:
    """Captures the forward that runs between `start` and `stop`.

    Args:
        prefix: frozen prefix of the model in training; its layer modules are not captured.
        samples: samples of the batch to compare, at most.
        crop: keep only these samples.

    Attributes:
        version: version of the prefix in this step.
        timer: times at which forward and backward passed the boundaries.
        weights: weights that FSDP2 gathered in this step; None without FSDP2.
        answer: answer of the reference; None before the evaluation is sent.
    """

    def __init__(self, prefix: FrozenPrefix, samples: int, crop: bool) -> None:
        self.version = prefix.version
        self.answer: Future[Comparison] | None = None
        modules = dict(prefix.module.named_modules())
        self.timer = BoundaryTimer(modules, prefix.chain, first=prefix.depth)
        self.weights: GatheredWeights | None = None
        if holds_shards(prefix.module):
            self.weights = GatheredWeights(prefix.module)
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
        """Mark the end of the backward; only the first call counts."""
        if self.timer.backward_ended is None:
            self.timer.backward_ended = mark(self._device)

    def evaluation(self) -> Evaluation | None:
        """Return the evaluation to send to the reference; None if the step did not call the network.

        Raises:
            Exception: if copying an argument failed, as a user's class may.
        """
        calls = self._calls.calls
        return Evaluation(calls, self._network, self._first) if calls else None

    def _entered(self, first: Tensor | None) -> None:
        self._device = first.device if first is not None else self._device
        self.timer.began = mark(self._device)
        self._batch_size = first.shape[0] if first is not None and first.ndim else None

    def _keep(self, tensor: Tensor) -> Tensor:
        """Copy a tensor, because the network may change its input in place."""
        if self._crop and tensor.ndim and tensor.shape[0] == self._batch_size:
            tensor = tensor[: self._samples]
        return tensor.detach().clone()
