"""The rule of the paper, as reconstructed: a layer module freezes when its plasticity has stopped changing."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from lightning_egeria.core.training.checkpoints import checkpoint_read, count_of, number_of
from lightning_egeria.core.training.freezer import Decision
from lightning_egeria.errors import ArgumentError, check_integers
from lightning_egeria.freezing.annealing import Annealing
from lightning_egeria.freezing.policy import in_words

FIRST_SLOPES = 5  # slopes before one may count as calm: the largest of fewer means little


def least_squares_slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through ``values`` at x = 0, 1, 2, ...

    In closed form: ``sum((x - mean(x)) * (y - mean(y))) / sum((x - mean(x))^2)``.

    Args:
        values: at least two numbers.

    Returns:
        Change of the line per value.

    Raises:
        ValueError: if there are fewer than two values.

    >>> least_squares_slope([1.0, 3.0, 5.0])
    2.0
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"a slope needs at least two values, got {n}")
    center, mean = (n - 1) / 2, sum(values) / n
    spread = n * (n * n - 1) / 12
    return sum((x - center) * (y - mean) for x, y in enumerate(values)) / spread


class PlasticitySeries:
    """Plasticity of one layer module: the raw values of a window, their moving average, and its slope.

    Each refresh of the reference resets the raw values, which makes them a saw-tooth. A window as long as the interval
    between two refreshes averages over every age of the reference once, which cancels the saw-tooth.

    >>> series = PlasticitySeries(window_evaluations=2)
    >>> [series.append(value) for value in (4.0, 2.0, 1.0)]
    [None, None, -1.5]
    """

    def __init__(self, window_evaluations: int) -> None:
        self._raw: deque[float] = deque(maxlen=window_evaluations)
        self._averages: deque[float] = deque(maxlen=window_evaluations)

    def append(self, value: float) -> float | None:
        """Add one raw value; return the slope per evaluation, or None until the window of averages is full."""
        self._raw.append(value)
        if len(self._raw) == self._raw.maxlen:
            self._averages.append(sum(self._raw) / len(self._raw))
        if len(self._averages) < (self._averages.maxlen or 0):
            return None
        return least_squares_slope(self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {"raw": list(self._raw), "averages": list(self._averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._raw = deque(state["raw"], maxlen=self._raw.maxlen)
        self._averages = deque(state["averages"], maxlen=self._averages.maxlen)


class Stage(enum.Enum):
    """Stage of a `SlopePolicy`."""

    BOOTSTRAP = "bootstrap"
    GUIDED = "guided"
    EXHAUSTED = "exhausted"


@dataclasses.dataclass
class _Track:
    """History of one layer module."""

    series: PlasticitySeries
    slopes: int = 0
    largest_slope: float = 0.0
    slope: float = math.nan
    calm: int = 0  # evaluations in a row with a slope below the threshold


class SlopePolicy(Annealing):
    """Freezes a layer module when its plasticity has stopped changing (Egeria, EuroSys 2023, as reconstructed).

    The policy first waits for the training loss to settle (bootstrapping). Then it smooths each layer module's
    plasticity and fits a line through the last averages. When the absolute slope stays below ``tolerance`` times the
    largest so far for ``patience`` evaluations in a row, the first active layer module freezes, together with those
    behind it that also qualify. When the learning rate jumps, everything unfreezes, and window and patience are halved.

    It is meant for 200 evaluations per run: ``KnowledgeGuidedFreezing(SlopePolicy(), evaluate_every_n_steps=steps //
    200)``. `FreezingPolicy` gave better results; see the method card.

    Args:
        tolerance: share of the largest slope so far below which a layer module counts as calm; in (0, 1). Higher
            freezes sooner.
        window_evaluations: evaluations in the moving average and in the line; at least 2.
        patience: evaluations in a row that must be calm; at least 1. Higher freezes later.
        refresh_every_n_evaluations: evaluations after which the reference takes the current weights; at least 1.
        bootstrap: wait for the loss to settle before measuring.
        bootstrap_threshold: relative change of the mean loss between two windows below which it counts as settled; > 0.
        unfreeze_on: ``"annealing"`` unfreezes everything when the learning rate jumps, ``"never"`` does not.
        unfreeze_lr_factor: drop of the learning rate within one step that unfreezes, or its inverse as a rise; in
            (0, 1).

    Attributes:
        stage: bootstrapping, guided, or exhausted (nothing more can freeze).
        depth: number of layer modules the policy has frozen.

    Raises:
        ArgumentError: if an argument is out of range.

    >>> policy = SlopePolicy(window_evaluations=2, patience=2, bootstrap=False)
    >>> policy.start(max_depth=1)
    >>> for step, plasticity in enumerate([8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]):
    ...     decision = policy.observe(step, [plasticity, 1.0], learning_rate=0.1, loss=None)
    ...     if decision:
    ...         print(step, decision.depth, policy.stage.value)
    8 1 exhausted
    """

    def __init__(
        self,
        tolerance: float = 0.2,
        window_evaluations: int = 10,
        patience: int = 10,
        refresh_every_n_evaluations: int = 10,
        bootstrap: bool = True,
        bootstrap_threshold: float = 0.1,
        unfreeze_on: Literal["annealing", "never"] = "annealing",
        unfreeze_lr_factor: float = 0.1,
    ) -> None:
        super().__init__(unfreeze_on, unfreeze_lr_factor)
        if not 0 < tolerance < 1:
            raise ArgumentError(f"tolerance must be in (0, 1), got {tolerance}")
        check_integers(2, window_evaluations=window_evaluations)
        check_integers(1, patience=patience, refresh_every_n_evaluations=refresh_every_n_evaluations)
        if not bootstrap_threshold > 0:
            raise ArgumentError(f"bootstrap_threshold must be greater than 0, got {bootstrap_threshold}")
        self.tolerance = tolerance
        self.window_evaluations = window_evaluations
        self.patience = patience
        self.refresh_every_n_evaluations = refresh_every_n_evaluations
        self.bootstrap_threshold = bootstrap_threshold
        self.stage = Stage.BOOTSTRAP if bootstrap else Stage.GUIDED
        self.depth = 0
        self._max_depth = 0
        self._evaluations = 0  # in the guided stage
        self._tracks: list[_Track] = []
        self._losses: list[float] = []
        self._window_loss: float | None = None
        self._largest_loss = 0.0

    @property
    def wants_reference(self) -> bool:
        """True in the guided stage only."""
        return self.stage is Stage.GUIDED

    @property
    def holds_reference(self) -> bool:
        """Whether the reference is younger than `refresh_every_n_evaluations`."""
        return self._evaluations % self.refresh_every_n_evaluations > 0

    @property
    def slopes(self) -> tuple[float, ...]:
        """Latest slope of each layer module's smoothed plasticity; NaN where there is none yet."""
        return tuple(track.slope for track in self._tracks)

    def start(self, max_depth: int) -> None:
        """Set how deep the prefix may become. If nothing more may freeze, the policy is exhausted."""
        self._max_depth, self.depth = max_depth, min(self.depth, max_depth)
        if self.depth == max_depth:
            self.stage = Stage.EXHAUSTED

    def observe(
        self,
        step: int,
        plasticity: Sequence[float] | None,
        learning_rate: float,
        loss: float | None,
        layer_shares: Sequence[float] | None = None,
    ) -> Decision | None:
        """Run one step of the state machine; arguments as for `Policy.observe`.

        It ignores an evaluation with a NaN or infinite plasticity, and every evaluation at a learning rate of 0 (the
        first epoch of a warm-up, for example), where weights cannot move.
        """
        if self.stage is Stage.GUIDED and loss is not None:  # only evaluation steps have a loss
            self._evaluations += 1
        if (decision := self._jumped(learning_rate)) is not None:
            self._start_again()
            return decision
        if learning_rate == 0:
            return None
        if self.stage is Stage.BOOTSTRAP and loss is not None and math.isfinite(loss):
            self._bootstrap(loss)
        elif self.stage is Stage.GUIDED and plasticity and all(map(math.isfinite, plasticity[self.depth :])):
            return self._guide(plasticity, learning_rate)
        return None

    def _bootstrap(self, loss: float) -> None:
        self._losses.append(loss)
        if len(self._losses) < self.window_evaluations:
            return
        mean, before = sum(self._losses) / len(self._losses), self._window_loss
        self._losses, self._window_loss = [], mean
        self._largest_loss = max(self._largest_loss, abs(mean))
        # Relative to the largest, not to the one before: a loss near zero keeps halving long after it matters.
        if before is not None and abs(mean - before) <= self.bootstrap_threshold * self._largest_loss:
            self.stage = Stage.GUIDED

    def _guide(self, plasticity: Sequence[float], learning_rate: float) -> Decision | None:
        while len(self._tracks) < len(plasticity):
            self._tracks.append(_Track(PlasticitySeries(self.window_evaluations)))
        for track, value in zip(self._tracks[self.depth :], plasticity[self.depth :], strict=False):
            self._follow(track, value)
        decision = self._calm_front()
        if decision is None:
            return None
        self._froze(learning_rate)
        if decision.depth == self._max_depth:
            self.stage = Stage.EXHAUSTED
        self.depth = decision.depth
        return decision

    def _calm_front(self) -> Decision | None:
        depth, track = self.depth, self._tracks[self.depth]
        while depth < self._max_depth and self._tracks[depth].calm >= self.patience:
            depth += 1
        if depth == self.depth:
            return None
        return Decision(
            depth,
            f"plasticity slope {track.slope:.2e} stayed below {self.tolerance * track.largest_slope:.2e} for "
            + in_words(track.calm),
        )

    def _follow(self, track: _Track, value: float) -> None:
        slope = track.series.append(value)
        if slope is None:
            return
        track.slope = slope
        track.slopes += 1
        track.largest_slope = max(track.largest_slope, abs(slope))
        calm = track.slopes > FIRST_SLOPES and abs(slope) <= self.tolerance * track.largest_slope
        track.calm = track.calm + 1 if calm else 0

    def _start_again(self) -> None:
        if self.stage is Stage.EXHAUSTED:
            self._evaluations = 0  # there is a new reference
        self.depth, self.stage = 0, Stage.GUIDED
        self.window_evaluations = max(2, self.window_evaluations // 2)
        self.patience = max(1, self.patience // 2)
        self._tracks = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {
            "stage": self.stage.value,
            "depth": self.depth,
            "evaluations": self._evaluations,
            "window_evaluations": self.window_evaluations,
            "patience": self.patience,
            "losses": list(self._losses),
            "window_loss": self._window_loss,
            "largest_loss": self._largest_loss,
            "previous_lr": self._previous_lr,
            "lr_at_freeze": self._lr_at_freeze,
            "tracks": [{**vars(track), "series": track.series.state_dict()} for track in self._tracks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            CheckpointError: if the state is damaged.
        """
        with checkpoint_read():
            self.stage, self.depth = Stage(state["stage"]), count_of(state["depth"], most=self._max_depth)
            self._evaluations = count_of(state["evaluations"])
            self.window_evaluations = count_of(state["window_evaluations"], least=2, most=sys.maxsize)
            self.patience = count_of(state["patience"], least=1)
            self._losses = [number_of(loss) for loss in state["losses"]]
            self._window_loss = None if state["window_loss"] is None else number_of(state["window_loss"])
            self._largest_loss = number_of(state["largest_loss"])
            self._load_rates(state)
            self._tracks = [self._track_of(entry) for entry in state["tracks"]]

    def _track_of(self, state: dict[str, Any]) -> _Track:
        series = PlasticitySeries(self.window_evaluations)
        series.load_state_dict({key: [number_of(value) for value in values] for key, values in state["series"].items()})
        numbers = number_of(state["largest_slope"]), number_of(state["slope"])
        return _Track(series, count_of(state["slopes"]), *numbers, count_of(state["calm"]))
