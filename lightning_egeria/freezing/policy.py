"""When to freeze and when to let go again: state machines that see floats only."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from lightning_egeria.errors import ArgumentError
from lightning_egeria.freezing.plasticity import PlasticitySeries

FIRST_SLOPES = 5  # slopes before any counts as calm: the largest of fewer says little


@dataclasses.dataclass(frozen=True)
class Decision:
    """Freeze exactly the first ``depth`` layer modules from here on, and why."""

    depth: int
    reason: str


class Policy(Protocol):
    """What decides the frozen depth. `start` comes once before the first `observe`."""

    @property
    def wants_reference(self) -> bool:
        """Whether plasticity is of use now; if not, no reference model is kept."""

    def start(self, max_depth: int) -> None:
        """Told how deep the prefix may become at most."""

    def observe(
        self, step: int, plasticity: Sequence[float] | None, learning_rate: float, loss: float | None
    ) -> Decision | None:
        """Told what is known after optimizer step ``step``; returns a decision, or None to leave the depth.

        Args:
            step: optimizer steps done so far.
            plasticity: one value per layer module from the front, NaN where not measured; None between evaluations.
            learning_rate: of the step that was done.
            loss: mean training loss since the last evaluation step; None between them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain types only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and value >= least


class Stage(enum.Enum):
    """Where a `FreezingPolicy` stands."""

    BOOTSTRAP = "bootstrap"
    GUIDED = "guided"
    EXHAUSTED = "exhausted"


@dataclasses.dataclass
class _Track:
    """What is remembered of one layer module."""

    series: PlasticitySeries
    slopes: int = 0
    largest_slope: float = 0.0
    slope: float = math.nan
    calm: int = 0  # evaluations in a row with a slope under the threshold


class FreezingPolicy:
    """Freezes a layer module when its plasticity has stopped changing (Egeria, EuroSys 2023, as reconstructed).

    Nothing is measured until the training loss has calmed down (bootstrapping). Then each layer module's plasticity is
    smoothed, and a line is laid through the last averages. When the size of its slope stays below ``tolerance`` times
    the largest slope it had so far for ``patience`` evaluations in a row, the frontmost active layer module freezes,
    and with it all that follow and qualify too. When the learning rate jumps, everything unfreezes and window and
    patience are halved.

    In fine-tuning (``bootstrap=False``) there is no bootstrapping and one decision: after the first window, the layer
    modules at the front that moved away from the given weights by less than ``peer_tolerance`` times what the one that
    moved most did freeze together; the others train to the end. If there is none, all goes on as from scratch.

    Args:
        tolerance: fraction of the largest slope so far that counts as calm; in (0, 1). Larger freezes sooner.
        window_evaluations: evaluations in the moving average and in the line; at least 2.
        patience: evaluations in a row that must be calm; at least 1.
        bootstrap: wait for the loss to calm down first. Switch it off in fine-tuning.
        bootstrap_threshold: change of the mean loss from one window to the next, relative to the largest window's,
            that still counts as unsettled; > 0.
        peer_tolerance: of fine-tuning; in [0, 1). 0 applies the rule of training from scratch from the first step.
        unfreeze_on: ``"annealing"`` unfreezes all when the learning rate jumps, ``"never"`` does not.
        unfreeze_lr_factor: fall of the learning rate in one step that unfreezes all; in (0, 1).

    Raises:
        ArgumentError: an argument is out of its range.

    >>> policy = FreezingPolicy(window_evaluations=2, patience=2, bootstrap=False, peer_tolerance=0)
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
        bootstrap: bool = True,
        bootstrap_threshold: float = 0.1,
        peer_tolerance: float = 0.1,
        unfreeze_on: Literal["annealing", "never"] = "annealing",
        unfreeze_lr_factor: float = 0.1,
    ) -> None:
        if not 0 < tolerance < 1:
            raise ArgumentError(f"tolerance must be in (0, 1), got {tolerance}")
        if not _is_whole(window_evaluations, least=2):
            raise ArgumentError(f"window_evaluations must be a whole number from 2 on, got {window_evaluations}")
        if not _is_whole(patience, least=1):
            raise ArgumentError(f"patience must be a whole number from 1 on, got {patience}")
        if not bootstrap_threshold > 0:
            raise ArgumentError(f"bootstrap_threshold must be greater than 0, got {bootstrap_threshold}")
        if not 0 <= peer_tolerance < 1:
            raise ArgumentError(f"peer_tolerance must be in [0, 1), got {peer_tolerance}")
        if unfreeze_on not in ("annealing", "never"):
            raise ArgumentError(f"unfreeze_on must be 'annealing' or 'never', got {unfreeze_on!r}")
        if not 0 < unfreeze_lr_factor < 1:
            raise ArgumentError(f"unfreeze_lr_factor must be in (0, 1), got {unfreeze_lr_factor}")
        self.tolerance = tolerance
        self.window_evaluations = window_evaluations
        self.patience = patience
        self.bootstrap_threshold = bootstrap_threshold
        self.peer_tolerance = peer_tolerance
        self.unfreeze_on = unfreeze_on
        self.unfreeze_lr_factor = unfreeze_lr_factor
        self.stage = Stage.BOOTSTRAP if bootstrap else Stage.GUIDED
        self.depth = 0
        self._max_depth = 0
        self._compares_peers = not bootstrap and peer_tolerance > 0
        self._tracks: list[_Track] = []
        self._losses: list[float] = []
        self._window_loss: float | None = None
        self._largest_loss = 0.0
        self._previous_lr: float | None = None
        self._lr_at_freeze: float | None = None

    @property
    def wants_reference(self) -> bool:
        """True in the guided stage only."""
        return self.stage is Stage.GUIDED

    @property
    def slopes(self) -> tuple[float, ...]:
        """Newest slope of each layer module's smoothed plasticity; NaN where there is none yet."""
        return tuple(track.slope for track in self._tracks)

    def start(self, max_depth: int) -> None:
        """Told how deep the prefix may become; a chain of which nothing may freeze exhausts the policy at once."""
        self._max_depth = max_depth
        if max_depth == 0:
            self.stage = Stage.EXHAUSTED

    def observe(
        self, step: int, plasticity: Sequence[float] | None, learning_rate: float, loss: float | None
    ) -> Decision | None:
        """One step of the state machine; arguments as for `Policy.observe`.

        An evaluation with a NaN or infinite plasticity is one that did not happen, and so is everything seen at a
        learning rate of 0: there, nothing changes because nothing learns (the first epoch of a warm-up, say).
        """
        before, self._previous_lr = self._previous_lr, learning_rate
        if before is not None and self._must_unfreeze(before, learning_rate):
            return self._unfreeze(before, learning_rate)
        if learning_rate == 0:
            return None
        if self.stage is Stage.BOOTSTRAP and loss is not None and math.isfinite(loss):
            self._bootstrap(loss)
        elif self.stage is Stage.GUIDED and plasticity and all(map(math.isfinite, plasticity[self.depth :])):
            return self._guide(plasticity, learning_rate)
        return None

    def _must_unfreeze(self, previous: float, learning_rate: float) -> bool:
        if self.unfreeze_on == "never" or self._lr_at_freeze is None:
            return False
        return self.is_annealing_event(previous, learning_rate, self._lr_at_freeze)

    def is_annealing_event(self, previous: float, learning_rate: float, at_freeze: float) -> bool:
        """Whether the learning rate jumped so far that frozen layers should learn again. Override for own schedules.

        A jump from or to a rate that is small beside ``at_freeze`` counts only if its other end is not: where a smooth
        schedule ends, or a periodic one turns, tiny rates lie far apart in proportion.

        Args:
            previous: learning rate of the step before.
            learning_rate: learning rate now.
            at_freeze: learning rate when the oldest layer module that is frozen now was frozen.
        """
        factor = self.unfreeze_lr_factor * (1 + 1e-6)  # 0.1 * 0.1 is not 0.01 in floating point
        fell = 0 < learning_rate <= factor * min(previous, at_freeze) and previous > factor * at_freeze
        rose = previous <= factor * learning_rate and learning_rate > factor * at_freeze
        return fell or rose

    def _bootstrap(self, loss: float) -> None:
        self._losses.append(loss)
        if len(self._losses) < self.window_evaluations:
            return
        mean, before = sum(self._losses) / len(self._losses), self._window_loss
        self._losses, self._window_loss = [], mean
        self._largest_loss = max(self._largest_loss, abs(mean))
        # Against the largest, not the one before: a loss near zero goes on halving long after it has stopped to matter.
        if before is not None and abs(mean - before) <= self.bootstrap_threshold * self._largest_loss:
            self.stage = Stage.GUIDED

    def _guide(self, plasticity: Sequence[float], learning_rate: float) -> Decision | None:
        while len(self._tracks) < len(plasticity):
            self._tracks.append(_Track(PlasticitySeries(self.window_evaluations)))
        for track, value in zip(self._tracks[self.depth :], plasticity[self.depth :], strict=True):
            self._follow(track, value)
        decision = self._compare_peers() if self._compares_peers else self._calm_front()
        if decision is None:
            return None
        if self._lr_at_freeze is None:
            self._lr_at_freeze = learning_rate
        if decision.depth == self._max_depth or self._compares_peers:
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
            f"plasticity slope {track.slope:.2e} within {self.tolerance * track.largest_slope:.2e} for "
            f"{track.calm} evaluations in a row",
        )

    def _compare_peers(self) -> Decision | None:
        """The one decision of fine-tuning, as soon as every layer module has a smoothed plasticity."""
        values = [track.series.smoothed for track in self._tracks]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        threshold, depth = self.peer_tolerance * max(known), 0
        while depth < self._max_depth and known[depth] < threshold:
            depth += 1
        if depth == 0:  # the given weights are no help: as from scratch
            self.stage, self._compares_peers, self._tracks = Stage.BOOTSTRAP, False, []
            return None
        return Decision(depth, f"plasticity up to {max(known[:depth]):.2e}, of {max(known):.2e} where it is largest")

    def _follow(self, track: _Track, value: float) -> None:
        slope = track.series.append(value)
        if slope is None:
            return
        track.slope = slope
        track.slopes += 1
        track.largest_slope = max(track.largest_slope, abs(slope))
        calm = track.slopes > FIRST_SLOPES and abs(slope) <= self.tolerance * track.largest_slope
        track.calm = track.calm + 1 if calm else 0

    def _unfreeze(self, previous: float, learning_rate: float) -> Decision:
        self.depth, self.stage, self._lr_at_freeze = 0, Stage.GUIDED, None  # those who were compared are so again
        self.window_evaluations = max(2, self.window_evaluations // 2)
        self.patience = max(1, self.patience // 2)
        self._tracks = []
        return Decision(0, f"learning rate went from {previous:.2e} to {learning_rate:.2e} in one step")

    def state_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {
            "stage": self.stage.value,
            "depth": self.depth,
            "window_evaluations": self.window_evaluations,
            "patience": self.patience,
            "losses": list(self._losses),
            "window_loss": self._window_loss,
            "largest_loss": self._largest_loss,
            "previous_lr": self._previous_lr,
            "lr_at_freeze": self._lr_at_freeze,
            "compares_peers": self._compares_peers,
            "tracks": [{**vars(track), "series": track.series.state_dict()} for track in self._tracks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.stage, self.depth = Stage(state["stage"]), state["depth"]
        self.window_evaluations, self.patience = state["window_evaluations"], state["patience"]
        self._losses, self._window_loss = list(state["losses"]), state["window_loss"]
        self._largest_loss = state["largest_loss"]
        self._previous_lr, self._lr_at_freeze = state["previous_lr"], state["lr_at_freeze"]
        self._compares_peers = state["compares_peers"]
        self._tracks = []
        for entry in state["tracks"]:
            series = PlasticitySeries(self.window_evaluations)
            series.load_state_dict(entry["series"])
            self._tracks.append(_Track(**{**entry, "series": series}))


class ScriptedPolicy:
    """Freezes and unfreezes at given steps: for tests, controls, and people who know better.

    Args:
        schedule: frozen depth by optimizer step. ``{200: 4, 900: 0}`` freezes the first four layer modules after
            step 200 and unfreezes them after step 900.

    Raises:
        ArgumentError: a step is below 1 or a depth negative; at the start of training, a depth over the chain's.

    >>> policy = ScriptedPolicy({200: 4, 900: 0})
    >>> policy.observe(200, None, learning_rate=0.1, loss=None)
    Decision(depth=4, reason='scripted for step 200')
    """

    wants_reference = False

    def __init__(self, schedule: Mapping[int, int]) -> None:
        given: object = schedule
        if not isinstance(given, Mapping):
            raise ArgumentError(f"schedule must be a mapping from steps to depths, got {given!r}")
        for step, depth in schedule.items():
            if not (_is_whole(step, least=1) and _is_whole(depth, least=0)):
                raise ArgumentError(
                    f"schedule needs whole steps from 1 on and whole depths from 0 on, got {{{step!r}: {depth!r}}}"
                )
        self.schedule = dict(sorted(schedule.items()))
        self._done = 0

    def start(self, max_depth: int) -> None:
        """Check the script against the model."""
        deepest = max(self.schedule.values(), default=0)
        if deepest > max_depth:
            raise ArgumentError(f"schedule freezes to depth {deepest}, but this model allows {max_depth} at most")

    def observe(
        self, step: int, plasticity: Sequence[float] | None, learning_rate: float, loss: float | None
    ) -> Decision | None:
        """The newest entry of the script that is due; arguments as for `Policy.observe`."""
        due = [entry for entry in self.schedule if self._done < entry <= step]
        if not due:
            return None
        self._done = due[-1]
        return Decision(self.schedule[self._done], f"scripted for step {self._done}")

    def state_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._done = state["done"]
