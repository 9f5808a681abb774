"""One search: which branch trains until when, which ones are given up, when it ends and who has won."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.searchers import Searcher
from lightning_egeria.methods.tuning.spaces import Setting
from lightning_egeria.methods.tuning.summary import WINDOWS, Label, Summary, summarize

BEST_TO_AGREE = 5  # branches whose speeds must agree for a search to end
AGREEMENT = 0.1
WINDOWS_IN_RACE = 5  # windows of a trial in a race, which may be short


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a search may spend.

    Attributes:
        first_steps: optimizer steps of a trial; of the first ones if ``halving``.
        most_steps: most steps of a trial.
        most_trials: most branches.
        most_total: most steps of all branches together.
        halving: whether the faster half of the branches continues, in trials twice as long, until one is left.
    """

    first_steps: int
    most_steps: int
    most_trials: int
    most_total: float = math.inf
    halving: bool = True

    @property
    def lengths(self) -> list[int]:
        """Steps that a branch has after each round, if it stays.

        >>> Limits(10, 77, 20).lengths
        [10, 20, 40, 77]
        """
        found = [min(self.first_steps, self.most_steps)]
        while found[-1] < self.most_steps:
            found.append(min(2 * found[-1], self.most_steps))
        return found

    @property
    def affordable(self) -> int:
        """Number of branches to begin with, two at least, so that all rounds together take ``most_total`` steps.

        >>> Limits(10, 77, 20, 308).affordable, Limits(10, 77, 20).affordable
        (11, 20)
        """
        counts = range(self.most_trials, 2, -1)
        return next((count for count in counts if self._cost(count) <= self.most_total), min(2, self.most_trials))

    def _cost(self, count: int) -> int:
        steps, cost = 0, 0
        for length in self.lengths:
            cost += count * (length - steps)
            steps, count = length, -(-count // 2)
            if count == 1:
                break
        return cost


@dataclasses.dataclass(frozen=True)
class TrialRequest:
    """Train a branch.

    Attributes:
        branch: its number; 0 is the first one.
        setting: its setting.
        steps: number of optimizer steps that it trains to, including the steps that it has already.
        needed: branches whose state may be asked for later, this one not among them.
    """

    branch: int
    setting: Setting
    steps: int
    needed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of an order.

    Attributes:
        losses: loss of each batch of the branch from its beginning.
        cost: what all of it took, in steps or in seconds.
        failed: why the branch could not train; None if it did.
        start: mean loss of these batches without learning; None if it is not known.
    """

    losses: Sequence[float]
    cost: float
    failed: str | None = None
    start: float | None = None


@dataclasses.dataclass
class Branch:
    """A branch of a search.

    Attributes:
        setting: its setting.
        steps: optimizer steps that it has trained.
        summary: of its losses; None before it has trained.
        failed: why it could not train; None if it did.
    """

    setting: Setting
    steps: int = 0
    summary: Summary | None = None
    failed: str | None = None

    @property
    def speed(self) -> float:
        """Speed of the branch; 0 if it failed or has diverged."""
        return self.summary.speed if self.summary is not None else 0.0

    @property
    def gain(self) -> tuple[float, float]:
        """Its speed, and without one the loss that it gains."""
        return self.speed, self.summary.gain if self.summary is not None else 0.0

    @property
    def alive(self) -> bool:
        """Whether it may train on."""
        return self.label not in (Label.DIVERGED, Label.FAILED)

    @property
    def score(self) -> float:
        """The result for a searcher: its speed, or -1 if it failed or has diverged."""
        return self.speed if self.alive else -1.0

    @property
    def label(self) -> Label:
        """What its losses show."""
        return self.summary.label if self.summary is not None else Label.FAILED

    def state(self) -> dict[str, Any]:
        """Return the branch in plain types."""
        known = {} if self.summary is None else {"range": self.summary.range, "noise": self.summary.noise}
        return {
            "setting": dict(self.setting),
            "steps": self.steps,
            "speed": self.speed,
            "label": self.label.value,
            "failed": self.failed,
            **known,
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a search.

    Attributes:
        branches: all branches, in the order of their first trial. The first one has the present setting.
        winner: number of the fastest branch; None if none made progress, and the present setting does no harm.
        trial_steps: steps of the last trials.
        reason: why the search ended.
    """

    branches: list[Branch]
    winner: int | None
    trial_steps: int
    reason: str


def search(searcher: Searcher, present: Setting, limits: Limits) -> Generator[TrialRequest, Result, Outcome]:
    """Search for the fastest setting by branches that are measured as those of MLtuner (Cui et al., arXiv:1803.07445).

    With ``halving``, all branches train for the same few steps; the faster half of them trains on until it has twice as
    many, and so on until one is left or a trial is as long as it may be (successive halving, Jamieson and Talwalkar,
    arXiv:1502.07943). It begins with as many settings as the limits allow. A searcher that refines is asked for more in
    each round, as long as the later ones keep an equal share of the steps that are left, and two branches stay to the
    end: the best of short trials is not always the best of long ones. A trial has five windows.

    Without, as in MLtuner, each setting has one trial, and the search ends when the speeds of the five best branches
    differ by less than 10 %, when there is nothing left to try, or at a limit.

    Args:
        searcher: chooses the settings.
        present: the setting to begin with. It has the first trial, whatever the searcher asks for.
        limits: what the search may spend.

    Yields:
        Orders; send the `Result` of each.

    Returns:
        The outcome.
    """
    rounds = _Rounds(searcher, present, limits)
    yield from rounds.halve() if limits.halving else rounds.one_by_one()
    steps = max((branch.steps for branch in rounds.branches), default=0)
    return Outcome(rounds.branches, rounds.winner, steps, rounds.reason or "")


class _Rounds:
    def __init__(self, searcher: Searcher, present: Setting, limits: Limits) -> None:
        self.branches: list[Branch] = []
        self.reason: str | None = None  # why there are no further settings
        self.spent_all = False
        self._searcher = searcher
        self._refines = getattr(searcher, "longer", None) if limits.halving else None
        self._present = present
        self._limits = limits
        self._spent = 0

    @property
    def _settings(self) -> int:
        """Number of settings; one that was given up may be tried again from the beginning, in longer trials."""
        return len({repr(branch.setting) for branch in self.branches})

    @property
    def best(self) -> int | None:
        """The fastest of the branches with the longest trials; None if none makes progress."""
        return next(iter(self._ranked(range(len(self.branches)))), None)

    @property
    def winner(self) -> int | None:
        """The best one. If none makes progress and the present setting fails or diverges, the one that loses least."""
        alive = [number for number, branch in enumerate(self.branches) if branch.alive]
        if self.best is not None or not alive or self.branches[0].alive:
            return self.best
        return max(alive, key=lambda number: self.branches[number].gain)

    def one_by_one(self) -> Generator[TrialRequest, Result, None]:
        while (number := self._next_branch(self._limits.most_trials)) is not None:
            best = self.best
            yield from self._train(number, self._limits.first_steps, [best] if best is not None else [])
            if self._agreed():
                self.reason = f"the {BEST_TO_AGREE} best speeds differ by less than {AGREEMENT:.0%}"

    def halve(self) -> Generator[TrialRequest, Result, None]:
        first, *lengths = self._limits.lengths
        racing: list[int] = []
        yield from self._try_others(racing, first, self._limits.affordable)
        for left, steps in zip(range(len(lengths), 0, -1), lengths, strict=True):
            more = self._refines is not None and self._refines()
            kept = self._faster_half(racing, len(racing), least=2 if more else 1)
            cost = sum(steps - self.branches[number].steps for number in kept)
            if (len(kept) == 1 and not more) or not self._has_left(cost):
                break
            most = self._spent + (self._limits.most_total - self._spent) / left
            racing = []
            for at, number in enumerate(kept):
                yield from self._train(number, steps, [*self._may_go_on(racing, len(kept)), *kept[at + 1 :]])
                racing.append(number)
            if more and not self.spent_all:
                yield from self._try_others(racing, steps, self._limits.most_trials, most)
        if not self.spent_all and len(self.branches) > 1:
            self.reason = f"{self._settings} settings were compared"

    def _try_others(
        self, racing: list[int], steps: int, most: int, most_spent: float = math.inf
    ) -> Generator[TrialRequest, Result, None]:
        """Train further branches for a number of steps, and add them to the branches of the round."""
        self.reason = None
        while self._spent + steps <= most_spent and (number := self._next_branch(most)) is not None:
            yield from self._train(number, steps, self._may_go_on(racing, most))
            if self.spent_all:
                return
            racing.append(number)

    def _may_go_on(self, racing: Sequence[int], count: int) -> list[int]:
        """Those of a round of ``count`` branches, or more if it refines, that the next one may need."""
        return self._faster_half(racing, count if self._refines is None else 2 * len(racing))  # then all of them

    def _ranked(self, numbers: Sequence[int]) -> list[int]:
        """Those that make progress: longer trials tell more, and of as long ones the fastest is first."""
        branches = self.branches
        found = (number for number in numbers if branches[number].speed > 0)
        return sorted(found, key=lambda number: (-branches[number].steps, -branches[number].speed))

    def _faster_half(self, numbers: Sequence[int], count: int, least: int = 1) -> list[int]:
        """Those that may be among the faster half of ``count``; all that may train on, if none makes progress yet."""
        alive = [number for number in numbers if self.branches[number].alive]
        if not any(self.branches[number].speed > 0 for number in alive):
            return alive
        return sorted(alive, key=lambda number: self.branches[number].gain, reverse=True)[: max(least, -(-count // 2))]

    def _has_left(self, steps: int) -> bool:
        """Whether trials may take this many more steps; the first one may. If not, the search ends."""
        if self._spent + steps > self._limits.most_total and self._spent > 0:
            self.spent_all, self.reason = True, f"{self._spent} steps of trials were used up"
        return not self.spent_all

    def _agreed(self) -> bool:
        speeds = sorted((branch.speed for branch in self.branches if branch.speed > 0), reverse=True)[:BEST_TO_AGREE]
        return len(speeds) == BEST_TO_AGREE and speeds[-1] > (1 - AGREEMENT) * speeds[0]

    def _next_branch(self, most: int) -> int | None:
        if self.reason is not None:
            return None
        if self._settings >= most:
            self.reason = f"{most} settings were tried"
            return None
        setting: Setting | None = self._present
        if self.branches:
            setting = self._searcher.ask()
            if setting == self._present and self._refines is None:  # it was tried; the searcher learns its speed
                self._searcher.tell(setting, self.branches[0].score)
                setting = self._searcher.ask()
        if setting is None:
            self.reason = "nothing was left to try" if len(self.branches) > 1 else "there is one setting"
            return None
        if setting.keys() != self._present.keys():  # of a searcher of the user's own
            raise ArgumentError(f"the searcher returned {setting!r}, expected values of {', '.join(self._present)}")
        self.branches.append(Branch(dict(setting)))
        return len(self.branches) - 1

    def _train(self, number: int, steps: int, needed: Sequence[int]) -> Generator[TrialRequest, Result, None]:
        branch = self.branches[number]
        cost = steps - branch.steps
        if not self._has_left(cost):
            if branch.steps == 0:  # it is the last one
                self.branches.pop()
            return
        result = yield TrialRequest(number, branch.setting, steps, tuple(needed))
        self._spent += cost
        first, branch.steps, branch.failed = branch.steps == 0, steps, result.failed
        windows = WINDOWS_IN_RACE if self._limits.halving else WINDOWS
        summary = None if result.failed is not None else summarize(result.losses, result.cost, result.start, windows)
        branch.summary = summary
        if first or self._refines is not None:
            self._searcher.tell(branch.setting, branch.score)
