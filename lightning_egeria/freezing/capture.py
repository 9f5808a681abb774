"""One training step, observed: what the network was given, and when it passed which boundary."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

import torch
from torch import Tensor

from lightning_egeria.calls import CallRecorder
from lightning_egeria.clock import mark
from lightning_egeria.compilation import eager
from lightning_egeria.freezing.costs import BoundaryTimer
from lightning_egeria.freezing.reference import Comparison, Evaluation
from lightning_egeria.freezing.sharded import PassingWeights
from lightning_egeria.layers import FrozenPrefix
from lightning_egeria.tracing import holds_shards


class StepCapture:
    """Observes the forward that runs between `start` and `stop`.

    Args:
        prefix: of the model in training; its frozen layer modules are not recorded.
        samples: how many samples of the batch are compared at most.
        crop: whether the reference needs no more than those.

    Attributes:
        version: of the prefix, when the step was observed.
        timer: the times at which forward and backward passed the boundaries.
        weights: that passed by, if they are divided among ranks; None if they are not.
        answer: of the reference, once the evaluation was sent to it.
    """

    def __init__(self, prefix: FrozenPrefix, samples: int, crop: bool) -> None:
        self.version = prefix.version
        self.answer: Future[Comparison] | None = None
        modules = dict(prefix.module.named_modules())
        self.timer = BoundaryTimer(modules, prefix.chain, first=prefix.depth)
        self.weights: PassingWeights | None = None
        if holds_shards(prefix.module):
            self.weights = PassingWeights(prefix.module)
        self._first = prefix.depth
        self._network = {path: modules[path] for path in prefix.chain.entries}
        self._samples = samples
        self._crop = crop
        self._batch_size: int | None = None
        self._calls = CallRecorder(modules, prefix.chain.entries, self._keep, self._entered)
        self._uncompiled = contextlib.ExitStack()

    def start(self) -> None:
        """Observe from here on."""
        self._uncompiled.enter_context(eager())
        self._calls.start()
        self.timer.start()
        if self.weights is not None:
            self.weights.start()

    def stop(self) -> None:
        """Leave the modules as they were. Safe to call twice."""
        if self.weights is not None:
            self.weights.stop()
        self.timer.stop()
        self._calls.stop()
        self._uncompiled.close()

    def backward_ended(self, device: torch.device) -> None:
        """The backward is done; the first time counts."""
        if self.timer.backward_ended is None:
            self.timer.backward_ended = mark(device)

    def evaluation(self) -> Evaluation | None:
        """What the reference is to be given; None if the step did not call the network.

        Raises:
            Exception: what the user's own class raised when its copy was made.
        """
        calls = self._calls.calls
        return Evaluation(calls, self._network, self._first) if calls else None

    def _entered(self, first: Tensor | None) -> None:
        self.timer.began = mark(first.device if first is not None else torch.device("cpu"))
        self._batch_size = first.shape[0] if first is not None and first.ndim else None

    def _keep(self, tensor: Tensor) -> Tensor:
        """A copy, because the network may change its input in place."""
        if self._crop and tensor.ndim and tensor.shape[0] == self._batch_size:
            tensor = tensor[: self._samples]
        return tensor.detach().clone()
