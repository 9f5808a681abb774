"""The cost of a step at each frozen depth, and the share of each layer module in it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.passing import BoundaryObserver
from lightning_egeria.core.profiling.clock import mark, reached, seconds_between

LAYERS_MEASURED = 50  # the median is over the latest timings of each layer module
BATCHES_MEASURED = 500  # the median is over the latest batches at each depth
WARM_UP_STEPS = 3  # after the start and after each change of depth, while allocators and caches settle


class BoundaryTimer(BoundaryObserver):
    """Marks when forward and backward pass each boundary, to attribute the step's time to layer modules.

    Args:
        modules: modules of the network, by path.
        chain: layer chain of the network.
        first: index of the first layer module to time.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, first: int) -> None:
        super().__init__(modules, chain, first)
        self.forward_marks: list[tuple[int, float | torch.cuda.Event]] = []
        self.backward_marks: list[tuple[int, float | torch.cuda.Event]] = []
        self.began: float | torch.cuda.Event | None = None
        self.backward_ended: float | torch.cuda.Event | None = None

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Mark the moment."""
        self.forward_marks.append((index, mark(activation.device)))
        if activation.requires_grad:
            activation.register_hook(lambda grad: self.backward_marks.append((index, mark(grad.device))))

    @property
    def timed(self) -> bool:
        """Whether the device has reached all marks; a GPU does so some time after the step."""
        marks = [self.began, self.backward_ended, *(moment for _, moment in self.forward_marks + self.backward_marks)]
        return all(reached(moment) for moment in marks if moment is not None)

    def layer_seconds(self) -> list[float] | None:
        """Return forward plus backward seconds of each layer module in this step; None if a boundary was not passed."""
        seconds = [0.0] * len(self.chain)
        passed = [{index for index, _ in marks} for marks in (self.forward_marks, self.backward_marks)]
        if self.began is None or self.backward_ended is None or any(len(one) < len(seconds) for one in passed):
            return None
        # A forward ends at its boundary, and a backward begins there.
        for (_, before), (index, moment) in itertools.pairwise([(0, self.began), *self.forward_marks]):
            seconds[index] += seconds_between(before, moment)
        for (index, moment), (_, after) in itertools.pairwise([*self.backward_marks, (0, self.backward_ended)]):
            seconds[index] += seconds_between(moment, after)
        return seconds


@dataclasses.dataclass
class _DepthTimes:
    batches: int = 0
    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=BATCHES_MEASURED))


class StepCosts:
    """Seconds of the training batches of one fit by frozen depth, and of the evaluations.

    Times are medians, because a compilation or a pause of the machine takes a thousand times as long as a batch. They
    exclude batches with an evaluation, whose cost is in ``evaluation_seconds``.

    >>> costs = StepCosts()
    >>> for step in range(8):
    ...     costs.add(depth=0, seconds=2.0, evaluated=False)
    >>> for step in range(8):
    ...     costs.add(depth=3, seconds=1.0, evaluated=False)
    >>> costs.median_seconds(0), costs.median_seconds(3), costs.seconds_saved()
    (2.0, 1.0, 8.0)
    """

    def __init__(self) -> None:
        self._began: float | torch.cuda.Event | None = None
        self._unread: deque[tuple[int, bool, float | None, float | torch.cuda.Event, float | torch.cuda.Event]]
        self._unread = deque()
        self._by_depth: dict[int, _DepthTimes] = {}
        self.evaluation_seconds = 0.0
        self._settling = WARM_UP_STEPS
        self._last_depth = 0
        self._began_cpu = 0.0
        self._first: tuple[float, float | None] | None = None  # of the last batch while those at depth 0 settle
        self._pace: deque[float] = deque(maxlen=BATCHES_MEASURED)  # seconds for a second of the processor
        self._layer_seconds: deque[list[float]] = deque(maxlen=LAYERS_MEASURED)

    def batch_start(self, device: torch.device) -> None:
        """Mark the start of a training batch on ``device``."""
        self._began, self._began_cpu = mark(device), time.process_time()

    def batch_end(self, device: torch.device, depth: int, evaluated: bool) -> None:
        """Mark the end of the batch. It counts once the device has reached this moment; this does not wait."""
        if self._began is not None:
            cpu_seconds = time.process_time() - self._began_cpu if device.type == "cpu" else None
            self._unread.append((depth, evaluated, cpu_seconds, self._began, mark(device)))
        self._began = None
        self._read()

    def _read(self) -> None:
        while self._unread and reached(self._unread[0][-1]):
            depth, evaluated, cpu_seconds, began, ended = self._unread.popleft()
            self.add(depth, seconds_between(began, ended), evaluated, cpu_seconds)

    def add(self, depth: int, seconds: float, evaluated: bool, cpu_seconds: float | None = None) -> None:
        """Add a training batch with ``depth`` layer modules frozen.

        Args:
            depth: number of frozen layer modules.
            seconds: that it took.
            evaluated: whether an evaluation was part of it.
            cpu_seconds: that the process worked meanwhile, where the device is the CPU.
        """
        if depth != self._last_depth:
            self._settling, self._last_depth = WARM_UP_STEPS, depth
        times = self._by_depth.setdefault(depth, _DepthTimes())
        times.batches += 1
        if evaluated:
            return
        if self._settling:
            self._settling -= 1
            if not depth:
                self._first = seconds, cpu_seconds
            return
        times.seconds.append(seconds)
        if cpu_seconds:
            self._pace.append(seconds / cpu_seconds)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time of the body as evaluation time of the training thread."""
        started = time.perf_counter()
        yield
        self.evaluation_seconds += time.perf_counter() - started

    def add_layer_seconds(self, seconds: list[float]) -> None:
        """Add forward plus backward seconds of each layer module, from one step with nothing frozen."""
        self._layer_seconds.append(seconds)

    def median_seconds(self, depth: int) -> float | None:
        """Return the median seconds of a batch at ``depth`` without an evaluation; None if there was none.

        Where the first freeze came within a few batches, the one before it counts.
        """
        self._read()
        times = self._by_depth.get(depth)
        if times and times.seconds:
            return statistics.median(times.seconds)
        if depth or self._first is None:
            return None
        seconds, cpu_seconds = self._first  # the machine may have been busy with other work
        usual = cpu_seconds * statistics.median(self._pace) if cpu_seconds and self._pace else seconds
        return min(seconds, usual)

    def layer_shares(self, count: int) -> list[float | None]:
        """Return each layer module's share of a step with nothing frozen; None where not measured."""
        step = self.median_seconds(0)
        if step is None or not self._layer_seconds:
            return [None] * count
        layers = [statistics.median(column) for column in zip(*self._layer_seconds, strict=True)]
        step = max(step, sum(layers))  # the steps in which they are timed may be slower than the others
        return [seconds / step for seconds in layers]

    def seconds_saved(self) -> float | None:
        """Return the estimated seconds saved; None if not measured.

        For each depth: the number of batches times the difference of the median to that with nothing frozen. This does
        not subtract `evaluation_seconds`.
        """
        before = self.median_seconds(0)
        if before is None:
            return None
        medians = {depth: self.median_seconds(depth) for depth in [*self._by_depth] if depth}
        return sum(
            (before - median) * self._by_depth[depth].batches for depth, median in medians.items() if median is not None
        )
