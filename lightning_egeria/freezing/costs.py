"""What a step costs at each frozen depth, and which share of it each layer module has."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_egeria.clock import mark, seconds_between
from lightning_egeria.freezing.recording import BoundaryRecorder
from lightning_egeria.layers import LayerChain

LAYERS_MEASURED = 50  # times that a layer module is timed, for the median: the newest
WARM_UP_STEPS = 3  # after the start and after each change of depth: allocators and caches settle


class BoundaryTimer(BoundaryRecorder):
    """Marks when forward and backward pass each boundary, to attribute the step's time to layer modules.

    Args:
        modules: the modules of the network by path.
        chain: names the boundaries.
        first: index of the first layer module that is timed.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, first: int) -> None:
        super().__init__(modules, chain, samples=0, first=first)
        self.forward_marks: dict[int, float | torch.cuda.Event] = {}
        self.backward_marks: dict[int, float | torch.cuda.Event] = {}
        self.began: float | torch.cuda.Event | None = None
        self.backward_ended: float | torch.cuda.Event | None = None

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Marks the moment."""
        self.forward_marks[index] = mark(activation.device)
        if activation.requires_grad:
            activation.register_hook(lambda grad: self.backward_marks.__setitem__(index, mark(grad.device)))

    @property
    def timed(self) -> bool:
        """Whether all marks have been reached, which a GPU does some time after the step."""
        marks = [self.began, self.backward_ended, *self.forward_marks.values(), *self.backward_marks.values()]
        return all(moment.query() for moment in marks if isinstance(moment, torch.cuda.Event))

    def layer_seconds(self) -> list[float] | None:
        """Forward plus backward seconds of each layer module in this step; None if something was not passed."""
        count = len(self.chain)
        if self.began is None or self.backward_ended is None:
            return None
        if len(self.forward_marks) < count or len(self.backward_marks) < count:
            return None
        # The forward of a layer module starts where the one before was left; its backward ends where that one's starts.
        entered = [self.began, *(self.forward_marks[i] for i in range(count - 1))]
        finished = [self.backward_ended, *(self.backward_marks[i] for i in range(count - 1))]
        return [
            seconds_between(entered[i], self.forward_marks[i]) + seconds_between(self.backward_marks[i], finished[i])
            for i in range(count)
        ]


@dataclasses.dataclass
class _DepthTimes:
    steps: int = 0
    measured: int = 0  # of them
    seconds: float = 0.0  # that these took


class StepCosts:
    """Wall seconds of the training steps of one fit, by frozen depth, and of the evaluations.

    Steps that carried an evaluation do not count for the means; what evaluations cost is measured on its own.

    >>> costs = StepCosts()
    >>> for step in range(8):
    ...     costs.add(depth=0, seconds=2.0, evaluated=False)
    >>> for step in range(8):
    ...     costs.add(depth=3, seconds=1.0, evaluated=False)
    >>> costs.mean_seconds(0), costs.mean_seconds(3), costs.seconds_saved()
    (2.0, 1.0, 8.0)
    """

    def __init__(self) -> None:
        self._by_depth: dict[int, _DepthTimes] = {}
        self.evaluation_seconds = 0.0
        self._settling = WARM_UP_STEPS
        self._last_depth = 0
        self._layer_seconds: deque[list[float]] = deque(maxlen=LAYERS_MEASURED)

    def add(self, depth: int, seconds: float, evaluated: bool) -> None:
        """One training step took ``seconds`` with ``depth`` layer modules frozen."""
        if depth != self._last_depth:
            self._settling, self._last_depth = WARM_UP_STEPS, depth
        times = self._by_depth.setdefault(depth, _DepthTimes())
        times.steps += 1
        if evaluated:
            return
        if self._settling:
            self._settling -= 1
        else:
            times.measured += 1
            times.seconds += seconds

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around what an evaluation takes of the training thread."""
        started = time.perf_counter()
        yield
        self.evaluation_seconds += time.perf_counter() - started

    def add_layer_seconds(self, seconds: list[float]) -> None:
        """Measured forward plus backward seconds of each layer module in one step with nothing frozen."""
        self._layer_seconds.append(seconds)

    def mean_seconds(self, depth: int) -> float | None:
        """Mean seconds of a step at ``depth`` without an evaluation; None if there was none."""
        times = self._by_depth.get(depth)
        return times.seconds / times.measured if times and times.measured else None

    def layer_shares(self, count: int) -> list[float | None]:
        """Share of a step with nothing frozen that each of the ``count`` layer modules takes; None: not measured."""
        step = self.mean_seconds(0)
        if step is None or not self._layer_seconds:
            return [None] * count
        layers = [statistics.median(column) for column in zip(*self._layer_seconds, strict=True)]
        step = max(step, sum(layers))  # the steps in which they are timed may be slower than the others
        return [seconds / step for seconds in layers]

    def seconds_saved(self) -> float | None:
        """Steps at each depth times what such a step was shorter than one with nothing frozen; None: not measured.

        The cost of the evaluations is not taken off; see `evaluation_seconds`.
        """
        before = self.mean_seconds(0)
        if before is None:
            return None
        means = {depth: self.mean_seconds(depth) for depth in self._by_depth if depth}
        return sum((before - mean) * self._by_depth[depth].steps for depth, mean in means.items() if mean is not None)
