"""When to freeze and when to let go again: state machines that see floats only."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from lightning_egeria.errors import ArgumentError, CheckpointError

COMPARED = 2  # evaluations after which pre-trained layer modules are compared with one another
FALLEN = 0.5  # of the highest learning rate so far: above it, nothing that began with new weights is called at rest
NEARLY = 0.6  # of the same: above it they are not even compared; what is to be at rest needs an earlier reference


@dataclasses.dataclass(frozen=True)
class Decision:
    """Freeze exactly the first ``depth`` layer modules from here on, and why."""

    depth: int
    reason: str


class Policy(Protocol):
    """What decides the frozen depth. `start` comes once before the first `observe`.

    It comes once more after `load_state_dict` if a resumed run allows less than the one before, or if what it compares
    with is not the reference of that run, whose weights only the checkpoints of a deterministic run hold.
    """

    @property
    def wants_reference(self) -> bool:
        """Whether plasticity is of use now; if not, no reference model is kept."""

    @property
    def holds_reference(self) -> bool:
        """Whether the next evaluation should be against the same weights as this one, and not against newer ones."""

    def start(self, max_depth: int) -> None:
        """Told how deep the prefix may become at most."""

    def observe(
        self, step: int, plasticity: Sequence[float] | None, learning_rate: float, loss: float | None
    ) -> Decision | None:
        """Told what is known after optimizer step ``step``; returns a decision, or None to leave the depth.

        Args:
            step: optimizer steps done so far.
            plasticity: one value for each prefix: that of its last layer module, or of an earlier one that is used
                behind it too and moves more; NaN where not measured; None between evaluations.
            learning_rate: of the step that was done; NaN if the optimizer has none, which says nothing.
            loss: mean training loss since the last evaluation step; None between them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain types only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is a whole number of at least ``least``."""
    return isinstance(value, int) and value >= least


@contextlib.contextmanager
def checkpoint_read() -> Iterator[None]:
    """Around what reads the state of freezing from a checkpoint.

    Raises:
        CheckpointError: in the place of what is raised by a state that is not one.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"the freezing state in the checkpoint is damaged: {type(error).__name__}: {error}"
        raise CheckpointError(text) from error


def count_of(value: object, least: int = 0, most: float = math.inf) -> int:
    """``value``, if it is a whole number in the bounds.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from {least} to {most}")
    return value


def number_of(value: object) -> float:
    """``value``, if it is a number; infinite ones and NaN are.

    Raises:
        ValueError: it is not.
    """
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)  # type: ignore[arg-type]  # it is one of the two


class Annealing:
    """When frozen layer modules learn again: where the learning rate jumps. What policies have in common.

    Args:
        unfreeze_on: ``"annealing"`` unfreezes all when the learning rate jumps, ``"never"`` does not.
        unfreeze_lr_factor: fall of the learning rate in one step that unfreezes all, or its inverse as a rise;
            in (0, 1).

    Raises:
        ArgumentError: an argument is out of its range.
    """

    def __init__(self, unfreeze_on: Literal["annealing", "never"], unfreeze_lr_factor: float) -> None:
        if unfreeze_on not in ("annealing", "never"):
            raise ArgumentError(f"unfreeze_on must be 'annealing' or 'never', got {unfreeze_on!r}")
        if not 0 < unfreeze_lr_factor < 1:
            raise ArgumentError(f"unfreeze_lr_factor must be in (0, 1), got {unfreeze_lr_factor}")
        self.unfreeze_on = unfreeze_on
        self.unfreeze_lr_factor = unfreeze_lr_factor
        self._previous_lr: float | None = None
        self._lr_at_freeze: float | None = None

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

    def _jumped(self, learning_rate: float) -> Decision | None:
        """The decision to unfreeze all, if the learning rate says so. To be asked at every step."""
        if math.isnan(learning_rate):
            return None
        before, self._previous_lr = self._previous_lr, learning_rate
        if before is None or self._lr_at_freeze is None or self.unfreeze_on == "never":
            return None
        if not self.is_annealing_event(before, learning_rate, self._lr_at_freeze):
            return None
        self._lr_at_freeze = None
        return Decision(0, f"learning rate went from {before:.2e} to {learning_rate:.2e} in one step")

    def _froze(self, learning_rate: float) -> None:
        """Remember the rate at the oldest freeze."""
        if self._lr_at_freeze is None and not math.isnan(learning_rate):
            self._lr_at_freeze = learning_rate

    def _load_rates(self, state: dict[str, Any]) -> None:
        before, at_freeze = state["previous_lr"], state["lr_at_freeze"]
        self._previous_lr = None if before is None else number_of(before)
        self._lr_at_freeze = None if at_freeze is None else number_of(at_freeze)


class FreezingPolicy(Annealing):
    """Freezes the front of the chain as far as it has come to rest.

    What freezing a prefix costs is what its output would still have changed, and what it saves is the work of the layer
    modules that freeze with it. So a prefix is at rest when the plasticity of its last layer module was within
    ``tolerance`` times the share of the chain that would freeze with it, at ``patience`` evaluations in a row, and the
    deepest one at rest freezes. What layer modules in the middle of it do does not matter: the output is all that the
    rest of the network sees of them. Where it sees more (another tower, say), that counts too.

    As long as some prefix is at rest, the reference stays what it is. Weights that the batches only shake are as far
    from it after four intervals as after one, and weights that learn slowly but steadily are sixteen times as far,
    squared. It matters most behind a frozen front: nearly all of the movement there had come from the front, and what
    is left looks still in a single interval though it learns.

    Plasticity falls with the square of the learning rate: while a high one keeps the weights moving nothing is at rest,
    and freezing would keep the noise that a lower rate is about to take away. So in a run whose learning rate decays in
    steps the front freezes some evaluations after a step, under a smooth schedule in the last third, and where all is
    still learning nothing does. Nor is anything called at rest before the learning rate has fallen to half of the
    highest so far, however little it moves: in a warm-up, what stands still has yet to begin, and a transformer's front
    moves little while it learns. Until shortly before that nothing is compared, which would cost time for nothing.
    Weights that were trained already only have to be past the warm-up.

    Weights that were trained already (``pretrained=True``) are told by comparing layer modules with one another: after
    the first two evaluations, the deepest prefix freezes whose last layer module has a mean plasticity below
    ``peer_tolerance`` times that of the one that moves most.

    Args:
        tolerance: plasticity at rest, if the whole chain were to freeze: the mean squared change, from one reference to
            the next, of a sample's likeness to the others (its row of the normalised Gram matrix, a vector of length
            1); > 0. Larger freezes sooner.
        patience: evaluations in a row at which a prefix must be at rest; at least 1.
        pretrained: whether training begins with weights that were trained on something like this.
        peer_tolerance: of pre-trained weights; in [0, 1). Larger freezes deeper.
        unfreeze_on: ``"annealing"`` unfreezes all when the learning rate jumps, ``"never"`` does not.
        unfreeze_lr_factor: fall of the learning rate in one step that unfreezes all; in (0, 1).

    Attributes:
        depth: what is frozen by its decision.

    Raises:
        ArgumentError: an argument is out of its range.

    >>> policy = FreezingPolicy(tolerance=0.04, patience=2)
    >>> policy.start(max_depth=3)
    >>> for step, second in enumerate([0.01, 0.03, 0.02, 0.01, 0.01]):
    ...     rate = 0.1 if step < 2 else 0.01
    ...     decision = policy.observe(step, [0.5, second, 0.1, 0.2], rate, loss=None)
    ...     if decision:
    ...         print(step, decision.depth, decision.reason)
    3 2 plasticity of 1.0e-02, within 2.0e-02 for 2 evaluations in a row
    """

    def __init__(
        self,
        tolerance: float = 4e-4,
        patience: int = 4,
        pretrained: bool = False,
        peer_tolerance: float = 0.01,
        unfreeze_on: Literal["annealing", "never"] = "annealing",
        unfreeze_lr_factor: float = 0.1,
    ) -> None:
        super().__init__(unfreeze_on, unfreeze_lr_factor)
        if not tolerance > 0:
            raise ArgumentError(f"tolerance must be greater than 0, got {tolerance}")
        if not is_whole(patience, least=1):
            raise ArgumentError(f"patience must be a whole number from 1 on, got {patience}")
        if not 0 <= peer_tolerance < 1:
            raise ArgumentError(f"peer_tolerance must be in [0, 1), got {peer_tolerance}")
        self.tolerance = tolerance
        self.patience = patience
        self.pretrained = pretrained
        self.peer_tolerance = peer_tolerance
        self.depth = 0
        self._max_depth = 0
        self._at_rest: list[int] = []  # of the prefix that ends with each layer module: evaluations in a row
        self._first: list[list[float]] = []  # plasticity that pre-trained weights are compared by
        self._compares = pretrained
        self._observed = False
        self._highest_lr = 0.0  # of the steps so far; for pre-trained weights, of the first and the evaluations

    @property
    def wants_reference(self) -> bool:
        """Whether there is more that could freeze, and the learning rate is low enough to see that, or nearly."""
        return self.depth < self._max_depth and (self.pretrained or self._has_fallen_to(NEARLY))

    @property
    def held_back(self) -> str | None:
        """What keeps all from being called at rest now, in words and numbers; None if nothing does, or is known to."""
        if self.pretrained or not self._max_depth or not self._observed or self._has_fallen_to(FALLEN):
            return None
        if self._previous_lr is None:
            return "the optimizer has told no learning rate"
        return f"the learning rate is {self._previous_lr:.1e}, and was {self._highest_lr:.1e} at most"

    @property
    def holds_reference(self) -> bool:
        """Whether some prefix is at rest, so far."""
        return any(self._at_rest[self.depth : self._max_depth])

    def start(self, max_depth: int) -> None:
        """Told how deep the prefix may become, and that a reference begins: what was at rest was so against another."""
        self._max_depth, self.depth, self._at_rest = max_depth, min(self.depth, max_depth), []

    def observe(
        self, step: int, plasticity: Sequence[float] | None, learning_rate: float, loss: float | None
    ) -> Decision | None:
        """Told what is known after a step; arguments as for `Policy.observe`.

        An evaluation with a NaN or infinite plasticity is one that did not happen, and so is everything seen at a
        learning rate of 0: there, nothing changes because nothing learns (the first epoch of a warm-up, say).
        """
        self._observed = True
        if (decision := self._jumped(learning_rate)) is not None:
            self.depth, self._at_rest, self._first, self._compares = 0, [], [], self.pretrained
            return decision
        if not (self.pretrained and self._highest_lr):
            self._raise_highest(learning_rate)
        if not self.wants_reference:
            self._at_rest = []
        if learning_rate == 0 or not plasticity or not all(map(math.isfinite, plasticity[self.depth :])):
            return None
        may_rest = self._may_rest(learning_rate)
        self._at_rest += [0] * (len(plasticity) - len(self._at_rest))
        for index in range(self.depth, len(plasticity)):
            at_rest = may_rest and plasticity[index] <= self._limit(index + 1, plasticity)
            self._at_rest[index] = self._at_rest[index] + 1 if at_rest else 0
        decision = (self._compared(plasticity) if self._compares else None) or self._rested(plasticity)
        if decision is not None:
            self._froze(learning_rate)
            self.depth, self._at_rest = decision.depth, []  # from here on, less would freeze with each
        return decision

    def _may_rest(self, learning_rate: float) -> bool:
        """Whether the learning rate is such that what stands still has come to rest. To be asked at each evaluation."""
        if not self.pretrained:
            return math.isfinite(learning_rate) and self._has_fallen_to(FALLEN)
        rises = learning_rate > self._highest_lr * (1 + 1e-6)
        self._raise_highest(learning_rate)
        return not rises

    def _raise_highest(self, learning_rate: float) -> None:
        if math.isfinite(learning_rate):
            self._highest_lr = max(self._highest_lr, learning_rate)

    def _has_fallen_to(self, share: float) -> bool:
        """Whether the learning rate is at most this share of the highest so far."""
        low = share * self._highest_lr * (1 + 1e-6)  # schedules that multiply step by step come to a little more
        return self._previous_lr is not None and 0 < self._previous_lr <= low

    def _deepest(self, fits: Callable[[int], bool]) -> int:
        """The deepest prefix that may freeze and of which this is true; 0 if there is none."""
        return next((depth for depth in range(self._max_depth, self.depth, -1) if fits(depth)), 0)

    def _limit(self, depth: int, plasticity: Sequence[float]) -> float:
        return self.tolerance * (depth - self.depth) / len(plasticity)

    def _rested(self, plasticity: Sequence[float]) -> Decision | None:
        depth = self._deepest(lambda depth: self._at_rest[depth - 1] >= self.patience)
        if not depth:
            return None
        found, limit = plasticity[depth - 1], self._limit(depth, plasticity)
        evaluations = f"{self._at_rest[depth - 1]} evaluations in a row"
        return Decision(depth, f"plasticity of {found:.1e}, within {limit:.1e} for {evaluations}")

    def _compared(self, plasticity: Sequence[float]) -> Decision | None:
        """What pre-trained weights allow at once."""
        self._first.append(list(plasticity))
        if len(self._first) < COMPARED:
            return None
        # A row from a damaged checkpoint may be longer; none is too short.
        means = [sum(column) / len(column) for column in zip(*self._first, strict=False)]
        self._first, self._compares = [], False
        largest = max(means)
        depth = self._deepest(lambda depth: means[depth - 1] < self.peer_tolerance * largest)
        if not depth:
            return None
        return Decision(depth, f"plasticity of {means[depth - 1]:.1e}, beside {largest:.1e} where it is largest")

    def state_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {
            "depth": self.depth,
            "at_rest": list(self._at_rest),
            "first": [list(row) for row in self._first],
            "compares": self._compares,
            "highest_lr": self._highest_lr,
            "previous_lr": self._previous_lr,
            "lr_at_freeze": self._lr_at_freeze,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: it is damaged.
        """
        with checkpoint_read():
            self.depth = count_of(state["depth"], most=self._max_depth)
            self._at_rest = [count_of(count) for count in state["at_rest"]]
            self._first = [[number_of(value) for value in row] for row in state["first"]]
            if any(len(row) <= self._max_depth for row in self._first):
                raise ValueError("it is of fewer layer modules")
            self._compares = bool(state["compares"])
            self._highest_lr = number_of(state["highest_lr"])
            self._load_rates(state)


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

    wants_reference = holds_reference = False

    def __init__(self, schedule: Mapping[int, int]) -> None:
        given: object = schedule
        if not isinstance(given, Mapping):
            raise ArgumentError(f"schedule must be a mapping from steps to depths, got {given!r}")
        for step, depth in schedule.items():
            if not (is_whole(step, least=1) and is_whole(depth, least=0)):
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
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: it is damaged.
        """
        with checkpoint_read():
            self._done = count_of(state["done"])
