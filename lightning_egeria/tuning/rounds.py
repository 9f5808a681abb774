"""One search: which branch trains until when, which ones are given up, when it ends and who has won."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from lightning_egeria.tuning.searchers import Searcher
from lightning_egeria.tuning.spaces import Setting
from lightning_egeria.tuning.summary import Label, Summary, summarize

TOP = 5  # branches whose speeds must agree for a search to end
AGREEMENT = 0.1


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a search may spend.

    Attributes:
        first_steps: optimizer steps of a trial; of the first one if ``doubling``.
        most_steps: most steps of a trial.
        most_trials: most branches.
        most_total: most steps of all branches together.
        doubling: whether trials get longer until a branch converges.
    """

    first_steps: int
    most_steps: int
    most_trials: int
    most_total: float = math.inf
    doubling: bool = True


@dataclasses.dataclass(frozen=True)
class Order:
    """Train a branch.

    Attributes:
        branch: its number; 0 is the first one.
        setting: its setting.
        steps: until it has so many optimizer steps. It may have some already, and goes on from there.
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
    def label(self) -> Label:
        """What its losses show."""
        return self.summary.label if self.summary is not None else Label.FAILED

    @property
    def alive(self) -> bool:
        """Whether it may train on."""
        return self.label not in (Label.DIVERGED, Label.FAILED)

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
        winner: number of the fastest branch; None if none made progress.
        trial_steps: steps of the last trials.
        reason: why the search ended.
    """

    branches: list[Branch]
    winner: int | None
    trial_steps: int
    reason: str


def search(searcher: Searcher, present: Setting, limits: Limits) -> Generator[Order, Result, Outcome]:
    """Search for the fastest setting, as MLtuner does (Cui et al., arXiv:1803.07445).

    With ``doubling``, each round adds a setting, trains all branches for the same number of steps, and gives up those
    that diverge. The steps double from round to round until a branch converges with another setting than the present
    one: a steady fall alone does not tell how long it takes to see a better one. After that, and without
    ``doubling``, each further setting has one trial of that length. The search ends when the speeds of the five best
    branches differ by less than 10 %, when there is nothing left to try, or at a limit.

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
    steps = min(limits.first_steps, limits.most_steps)
    if limits.doubling:
        yield from rounds.train_all(steps)
        while not (rounds.converging or rounds.spent_all or steps == limits.most_steps or rounds.only_one_left):
            steps = min(2 * steps, limits.most_steps)
            yield from rounds.train_all(steps)
        rounds.tell()
    while rounds.reason is None and not rounds.agreed:
        branch = rounds.next_branch()
        if branch is not None:
            yield from rounds.train(branch, steps)
        rounds.tell()
    reason = rounds.reason or f"the {TOP} best speeds differ by less than {AGREEMENT:.0%}"
    return Outcome(rounds.branches, rounds.best, steps, reason)


class _Rounds:
    def __init__(self, searcher: Searcher, present: Setting, limits: Limits) -> None:
        self.branches: list[Branch] = []
        self.reason: str | None = None  # why there are no further trials
        self.spent_all = False
        self._searcher = searcher
        self._present = present
        self._limits = limits
        self._untold: list[int] = []
        self._spent = 0

    @property
    def converging(self) -> bool:
        return any(branch.label is Label.CONVERGING for branch in self.branches[1:])

    @property
    def only_one_left(self) -> bool:
        return self.reason is not None and sum(branch.alive for branch in self.branches) <= 1

    @property
    def best(self) -> int | None:
        numbers = [number for number, branch in enumerate(self.branches) if branch.speed > 0]
        return max(numbers, key=lambda number: self.branches[number].speed, default=None)

    @property
    def agreed(self) -> bool:
        speeds = sorted((branch.speed for branch in self.branches if branch.speed > 0), reverse=True)[:TOP]
        return len(speeds) == TOP and speeds[-1] > (1 - AGREEMENT) * speeds[0]

    def next_branch(self) -> int | None:
        if self.reason is not None:
            return None
        if len(self.branches) >= self._limits.most_trials:
            self.reason = f"{self._limits.most_trials} settings were tried"
            return None
        setting: Setting | None = self._present
        if self.branches:
            setting = self._searcher.ask()
            if setting == self._present:  # it was tried; the searcher learns its speed
                self._searcher.tell(setting, self.branches[0].speed)
                setting = self._searcher.ask()
        if setting is None:
            self.reason = "every setting was tried" if len(self.branches) > 1 else "there is one setting"
            return None
        self.branches.append(Branch(setting))
        if len(self.branches) > 1:
            self._untold.append(len(self.branches) - 1)
        return len(self.branches) - 1

    def train_all(self, steps: int) -> Generator[Order, Result, None]:
        fresh = self.next_branch()
        if self.only_one_left:
            return  # there is nothing to compare it with
        for number in range(len(self.branches)):
            if self.branches[number].alive or number == fresh:
                yield from self.train(number, steps)

    def train(self, number: int, steps: int) -> Generator[Order, Result, None]:
        branch, best = self.branches[number], self.best
        if self._spent + steps - branch.steps > self._limits.most_total and number > 0:
            self.spent_all, self.reason = True, f"{self._spent} steps of trials were used up"
            if branch.steps == 0:  # it is the last one
                self.branches.pop()
                self._untold = [other for other in self._untold if other != number]
            return
        if self._limits.doubling and not self.converging:
            needed = [other for other, one in enumerate(self.branches) if one.alive]
        else:
            needed = [] if best is None else [best]
        result = yield Order(number, branch.setting, steps, tuple(other for other in needed if other != number))
        self._spent += steps - branch.steps
        branch.steps = steps
        branch.failed = result.failed
        branch.summary = None if result.failed is not None else summarize(result.losses, result.cost, result.start)

    def tell(self) -> None:
        for number in self._untold:
            self._searcher.tell(self.branches[number].setting, self.branches[number].speed)
        self._untold = []


def play(
    run: Generator[Order, Result, Outcome], results: Mapping[tuple[str, int], Result]
) -> tuple[list[Order], Outcome]:
    """Run a search whose results are known, by setting (its ``repr``) and steps; for tests and examples.

    >>> from lightning_egeria.tuning.searchers import GridSearcher
    >>> from lightning_egeria.tuning.spaces import Choice
    >>> run = search(GridSearcher({"lr": Choice([1, 2])}), {"lr": 1}, Limits(2, 2, 9, doubling=False))
    >>> known = {("{'lr': 1}", 2): Result([3.0, 2.0], 2), ("{'lr': 2}", 2): Result([3.0, 1.0], 2)}
    >>> orders, outcome = play(run, known)
    >>> [order.setting["lr"] for order in orders], outcome.winner, outcome.reason
    ([1, 2], 1, 'every setting was tried')
    """
    orders: list[Order] = []
    try:
        order = next(run)
        while True:
            orders.append(order)
            order = run.send(results[repr(order.setting), order.steps])
    except StopIteration as end:
        return orders, end.value
