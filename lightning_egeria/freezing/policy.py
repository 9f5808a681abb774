"""Policies: state machines over floats that decide when to freeze and when to unfreeze."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from lightning_egeria.core.training.checkpoints import checkpoint_read, count_of, number_of
from lightning_egeria.core.training.freezer import Decision
from lightning_egeria.errors import ArgumentError, check_integers
from lightning_egeria.freezing.annealing import Annealing

COMPARED = 2  # evaluations after which pre-trained layer modules are compared with one another
PEAK_SHARE_TO_FREEZE = 0.5  # of the learning rate's peak: from scratch, nothing freezes above it
PEAK_SHARE_TO_MEASURE = 0.6  # from scratch, nothing is measured above it: a converged prefix needs an earlier reference


class Policy(Protocol):
    """Decides the frozen depth. The callback calls `start` once, then `observe` after every optimizer step.

    A resumed run calls `start` again after `load_state_dict` if it allows fewer layer modules, or if the checkpoint
    lacks the reference's weights (only a deterministic run stores them).
    """

    @property
    def wants_reference(self) -> bool:
        """Whether the policy needs plasticity now; if not, no reference model is kept."""

    @property
    def holds_reference(self) -> bool:
        """Whether the next evaluation uses the same reference; if not, the reference takes the current weights."""

    def start(self, max_depth: int) -> None:
        """Set how deep the prefix may become."""

    def observe(
        self,
        step: int,
        plasticity: Sequence[float] | None,
        learning_rate: float,
        loss: float | None,
        layer_shares: Sequence[float] | None = None,
    ) -> Decision | None:
        """Take the measurements after optimizer step ``step``; return a decision, or None to keep the depth.

        Args:
            step: number of optimizer steps so far.
            plasticity: one value per layer module, front to back; NaN where not measured; None between evaluations.
                Where something behind a layer module also reads an earlier one, the larger of their values.
            learning_rate: learning rate of the step just taken; NaN if the optimizer has none.
            loss: mean training loss since the last evaluation step; None between evaluation steps.
            layer_shares: each layer module's share of a step; None if not measured, and in deterministic runs, where
                decisions must not depend on timing.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""


class FreezingPolicy(Annealing):
    """Freezes the front of the chain as far as it has converged.

    A prefix converges when the plasticity of its last layer module stays below ``tolerance`` times the share of the
    work that would freeze, for ``patience`` evaluations in a row. The deepest converged prefix freezes. From scratch,
    this needs a learning rate of at most half its peak; with ``pretrained=True`` it only needs one that does not rise.
    The method card gives the reasons.

    With ``pretrained=True``, the callback freezes after the second step, to the depth that a trial of some steps finds.
    It begins with all but 3 layer modules, and goes shallower while steps there lower the loss clearly faster.
    Where steps cannot be tried (manual optimization), and with ``trial=False``, the first two evaluations
    compare the layer modules with one another instead: the deepest prefix freezes whose last layer module moves less
    than ``peer_tolerance`` times the one that moves most.

    Args:
        tolerance: plasticity below which a prefix counts as converged, if the whole chain were to freeze; > 0. Higher
            freezes sooner.
        patience: evaluations in a row below the tolerance; at least 1. Higher freezes later.
        pretrained: whether training starts from weights trained on similar data. ``"auto"`` leaves the answer to the
            callback, which looks at the normalisation layers; until `resolve`, the policy takes them for untrained.
        peer_tolerance: share of the largest plasticity, for ``pretrained=True`` without a trial; in [0, 1). Higher
            freezes deeper.
        unfreeze_on: ``"annealing"`` unfreezes everything when the learning rate jumps, unless a trial has set the
            depth; ``"never"`` does not.
        unfreeze_lr_factor: drop of the learning rate within one step that unfreezes, or its inverse as a rise; in
            (0, 1).
        trial: for ``pretrained=True``: whether a trial sets the depth. Without one, layer modules are compared.

    Attributes:
        depth: number of layer modules the policy has frozen.
        concluded: whether the depth of pre-trained weights is set, by a trial or where none is possible; it stays.

    Raises:
        ArgumentError: if an argument is out of range.

    >>> policy = FreezingPolicy(tolerance=0.04, patience=2)
    >>> policy.start(max_depth=3)
    >>> for step, second in enumerate([0.01, 0.03, 0.02, 0.01, 0.01]):
    ...     rate = 0.1 if step < 2 else 0.01
    ...     decision = policy.observe(step, [0.5, second, 0.1, 0.2], rate, loss=None)
    ...     if decision:
    ...         print(step, decision.depth, decision.reason)
    3 2 plasticity 1.0e-02 stayed below 2.0e-02 for 2 evaluations
    """

    def __init__(
        self,
        tolerance: float = 4e-4,
        patience: int = 4,
        pretrained: bool | Literal["auto"] = "auto",
        peer_tolerance: float = 0.01,
        unfreeze_on: Literal["annealing", "never"] = "annealing",
        unfreeze_lr_factor: float = 0.1,
        trial: bool = True,
    ) -> None:
        super().__init__(unfreeze_on, unfreeze_lr_factor)
        if not tolerance > 0:
            raise ArgumentError(f"tolerance must be greater than 0, got {tolerance}")
        check_integers(1, patience=patience)
        if pretrained not in (True, False, "auto"):
            raise ArgumentError(f"pretrained must be True, False or 'auto', got {pretrained!r}")
        if not 0 <= peer_tolerance < 1:
            raise ArgumentError(f"peer_tolerance must be in [0, 1), got {peer_tolerance}")
        self.tolerance = tolerance
        self.patience = patience
        self.pretrained: bool | Literal["auto"] = "auto" if pretrained == "auto" else bool(pretrained)
        self.peer_tolerance = peer_tolerance
        self.trial = trial
        self.depth = 0
        self._in_trial = False
        self.concluded = False
        self._max_depth = 0
        self._at_rest: list[int] = []  # evaluations in a row below the limit, per last layer module of a prefix
        self._first: list[list[float]] = []  # first plasticities, to compare pre-trained layer modules with one another
        self._compares = self._trained
        self._observed = False
        self._highest_lr = 0.0  # of all steps so far; for pre-trained weights, of the first step and the evaluations

    @property
    def _trained(self) -> bool:
        return self.pretrained is True

    def resolve(self, pretrained: bool) -> None:
        """Answer ``pretrained="auto"``, before the first `observe`. The user's True or False stays."""
        if self.pretrained == "auto":
            self.pretrained = self._compares = pretrained

    @property
    def wants_trial(self) -> bool:
        """Whether a trial should tell the depth, once `start` was called."""
        return self._trained and self.trial and not self.concluded and self._max_depth > 0

    def start_trial(self) -> None:
        """A trial begins; no reference is needed until it is over."""
        self._in_trial = True

    def conclude(self, depth: int) -> None:
        """Take the depth that a trial found; it stays."""
        self.depth, self._in_trial, self.concluded = depth, False, True

    def compare_layers(self) -> None:
        """Make no trial: compare layer modules with one another."""
        self.trial, self._in_trial = False, False

    @property
    def wants_reference(self) -> bool:
        """Whether more layer modules may freeze, and the learning rate is low enough or nearly so."""
        if self.concluded or self._in_trial:
            return False
        return self.depth < self._max_depth and (self._trained or self._has_fallen_to(PEAK_SHARE_TO_MEASURE))

    @property
    def held_back(self) -> str | None:
        """Why nothing may freeze yet, in words and numbers; None if something may."""
        if self._trained or not self._max_depth or not self._observed or self._has_fallen_to(PEAK_SHARE_TO_FREEZE):
            return None
        if self._previous_lr is None:
            return "the optimizer has no 'lr' in its parameter groups"
        return f"the learning rate is {self._previous_lr:.1e}, with a peak of {self._highest_lr:.1e}"

    @property
    def holds_reference(self) -> bool:
        """Whether some prefix is below its limit: the reference stays then, so that slow drift accumulates."""
        return any(self._at_rest[self.depth : self._max_depth])

    def start(self, max_depth: int) -> None:
        """Set how deep the prefix may become, and count evaluations again: a new reference begins."""
        self._max_depth, self.depth, self._at_rest = max_depth, min(self.depth, max_depth), []

    def observe(
        self,
        step: int,
        plasticity: Sequence[float] | None,
        learning_rate: float,
        loss: float | None,
        layer_shares: Sequence[float] | None = None,
    ) -> Decision | None:
        """Take the measurements after a step; arguments as for `Policy.observe`.

        It ignores an evaluation with a NaN or infinite plasticity, and every evaluation at a learning rate of 0 (the
        first epoch of a warm-up, for example), where weights cannot move.
        """
        self._observed = True
        if self.concluded or self._in_trial:
            return None
        if (decision := self._jumped(learning_rate)) is not None:
            self.depth, self._at_rest, self._first, self._compares = 0, [], [], self._trained
            return decision
        if not (self._trained and self._highest_lr):
            self._raise_highest(learning_rate)
        if not self.wants_reference:
            self._at_rest = []
        if learning_rate == 0 or not plasticity or not all(map(math.isfinite, plasticity[self.depth :])):
            return None
        may_rest = self._may_rest(learning_rate)
        work = [1.0] * len(plasticity) if layer_shares is None else layer_shares
        self._at_rest += [0] * (len(plasticity) - len(self._at_rest))
        for index in range(self.depth, len(plasticity)):
            at_rest = may_rest and plasticity[index] <= self._limit(index + 1, work)
            self._at_rest[index] = self._at_rest[index] + 1 if at_rest else 0
        decision = (self._compared(plasticity) if self._compares else None) or self._rested(plasticity, work)
        if decision is not None:
            self._froze(learning_rate)
            self.depth, self._at_rest = decision.depth, []  # the remaining prefixes are smaller and have lower limits
        return decision

    def _may_rest(self, learning_rate: float) -> bool:
        """Whether the learning rate allows a prefix to count as converged. Call it at each evaluation."""
        if not self._trained:
            return math.isfinite(learning_rate) and self._has_fallen_to(PEAK_SHARE_TO_FREEZE)
        rises = learning_rate > self._highest_lr * (1 + 1e-6)
        self._raise_highest(learning_rate)
        return not rises

    def _raise_highest(self, learning_rate: float) -> None:
        if math.isfinite(learning_rate):
            self._highest_lr = max(self._highest_lr, learning_rate)

    def _has_fallen_to(self, share: float) -> bool:
        """Whether the learning rate is at most this share of its peak."""
        low = share * self._highest_lr * (1 + 1e-6)  # schedules that multiply at each step accumulate rounding
        return self._previous_lr is not None and 0 < self._previous_lr <= low

    def _deepest(self, fits: Callable[[int], bool]) -> int:
        """Return the largest depth that may freeze and for which ``fits`` is true; 0 if there is none."""
        return next((depth for depth in range(self._max_depth, self.depth, -1) if fits(depth)), 0)

    def _limit(self, depth: int, work: Sequence[float]) -> float:
        return self.tolerance * sum(work[self.depth : depth]) / sum(work)

    def _rested(self, plasticity: Sequence[float], work: Sequence[float]) -> Decision | None:
        depth = self._deepest(lambda depth: self._at_rest[depth - 1] >= self.patience)
        if not depth:
            return None
        found, limit = plasticity[depth - 1], self._limit(depth, work)
        evaluations = in_words(self._at_rest[depth - 1])
        return Decision(depth, f"plasticity {found:.1e} stayed below {limit:.1e} for {evaluations}")

    def _compared(self, plasticity: Sequence[float]) -> Decision | None:
        """Compare pre-trained layer modules with one another after the first evaluations."""
        self._first.append(list(plasticity))
        if len(self._first) < COMPARED:
            return None
        # A row from a damaged checkpoint may be too long, but not too short.
        means = [sum(column) / len(column) for column in zip(*self._first, strict=False)]
        self._first, self._compares = [], False
        largest = max(means)
        depth = self._deepest(lambda depth: means[depth - 1] < self.peer_tolerance * largest)
        if not depth:
            return None
        return Decision(
            depth, f"plasticity {means[depth - 1]:.1e}, against {largest:.1e} in the layer module that moves most"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {
            "depth": self.depth,
            "pretrained": self.pretrained,
            "concluded": self.concluded,
            "trial": self.trial,
            "at_rest": list(self._at_rest),
            "first": [list(row) for row in self._first],
            "compares": self._compares,
            "highest_lr": self._highest_lr,
            "previous_lr": self._previous_lr,
            "lr_at_freeze": self._lr_at_freeze,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`. With ``pretrained="auto"``, the answer of the checkpoint stays.

        Raises:
            CheckpointError: if the state is damaged.
        """
        with checkpoint_read():
            self.depth = count_of(state["depth"], most=self._max_depth)
            answer = state.get("pretrained", False)  # checkpoints before "auto" have none, and False was the default
            if answer not in (True, False, "auto"):
                raise ValueError(f"pretrained is {answer!r}")
            self.pretrained = answer if self.pretrained == "auto" else self.pretrained
            self.concluded = bool(state.get("concluded", False))
            if not state.get("trial", False):  # it compares layer modules, or was written before there were trials
                self.trial = False
            self._at_rest = [count_of(count) for count in state["at_rest"]]
            self._first = [[number_of(value) for value in row] for row in state["first"]]
            if any(len(row) <= self._max_depth for row in self._first):
                raise ValueError("it has fewer layer modules than this model")
            self._compares = bool(state["compares"])
            self._highest_lr = number_of(state["highest_lr"])
            self._load_rates(state)


def in_words(evaluations: int) -> str:
    """Return a number of evaluations for a message.

    >>> in_words(1), in_words(4)
    ('1 evaluation', '4 evaluations')
    """
    return f"{evaluations} evaluation{'' if evaluations == 1 else 's'}"
