"""Which methods a job trains with, and why: pure rules over what is known of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_egeria.core.training.methods import reason_against
from lightning_egeria.jobs.rules import IN_TABLE
from lightning_egeria.jobs.schema import METHODS

SHORT_S = 60.0  # a run below this is over before a method has paid for its start
SHORT_EPOCHS = 2
MIN_EPOCHS_FROM_SCRATCH = 12  # of the runs from scratch with steps that froze in the proof, the shortest
# Least and most training time as a share of the plain run's, over the workloads of the proof of that kind.
TOOK = {
    ("tuned", "freezing"): (0.32, 0.68),
    ("tuned", "cache"): (0.17, 0.65),
    ("steps", "freezing"): (0.84, 0.89),
    ("steps", "cache"): (0.83, 0.96),
    ("smooth", "freezing"): (0.89, 1.01),
}
SLOW_LINK = 0.25  # share of a step that ranks wait for each other


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an earlier run of the same code on the same data cost.

    Attributes:
        fit_s: seconds of the whole run.
        epochs: epochs of that run.
        data: share of a step's time that waits for data.
        communication: share of a step's time that waits for other ranks.
    """

    fit_s: float
    epochs: int
    data: float = 0.0
    communication: float = 0.0


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a job before it runs; None where nobody knows.

    Attributes:
        trains: whether `egeria-train` runs it.
        pretrained: whether the weights are trained already.
        epochs: epochs of the run.
        schedule: of the learning rate: ``"steps"``, ``"smooth"`` or ``"constant"``.
        augmented: whether samples are drawn anew in each epoch.
        ranks: processes that train.
        strategy: Lightning's name of the strategy.
        link_gbit: gigabits per second between ranks.
        measured: costs of an earlier run.
    """

    trains: bool
    pretrained: bool | None = None
    epochs: int | None = None
    schedule: str | None = None
    augmented: bool | None = None
    ranks: int = 1
    strategy: str = "auto"
    link_gbit: float | None = None
    measured: Measured | None = None

    @property
    def expected_s(self) -> float | None:
        """Seconds that the run will take, from the earlier one; None without."""
        if self.measured is None or self.epochs is None:
            return None
        return self.measured.fit_s / max(self.measured.epochs, 1) * self.epochs

    @property
    def slow_link(self) -> str | None:
        """Why the link between the ranks is slow; None if it is not, or nobody knows."""
        if self.ranks > 1 and self.measured is not None and self.measured.communication >= SLOW_LINK:
            return f"ranks waited for each other {self.measured.communication:.0%} of each step of an earlier run"
        if self.ranks > 1 and self.link_gbit is not None and self.link_gbit <= 10:
            return f"{self.ranks} ranks share a link of {self.link_gbit:g} Gbit/s"
        return None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Whether a method is on, with which options, and why."""

    method: str
    on: bool
    reason: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def choose(wanted: Any, facts: Facts, available: Callable[[str], str | None] = lambda method: None) -> list[Choice]:
    """Choose the methods of a job.

    Args:
        wanted: ``"auto"``, ``"none"``, or the methods that the description asks for or refuses; the others stay off.
        facts: what is known of the job.
        available: returns why a method cannot run here; None if it can.

    Returns:
        A choice for each method of the schema, in its order.
    """
    choices: list[Choice] = []
    for method in METHODS:
        options = wanted.get(method, False) if isinstance(wanted, Mapping) else None
        if not facts.trains:
            choice = Choice(method, False, "a command takes no methods: only experiments of egeria-train do")
        elif wanted == "none" or (isinstance(wanted, Mapping) and options is False):
            choice = Choice(method, False, "the description leaves it out")
        elif isinstance(wanted, Mapping):
            choice = Choice(
                method, True, "the description asks for it", options if isinstance(options, Mapping) else {}
            )
        else:
            choice = _decided(method, facts, {other.method for other in choices if other.on})
        against = available(method) if choice.on else None
        if against is not None and wanted == "auto":
            choice = Choice(method, False, f"{against}. Otherwise on: {choice.reason}")
        choices.append(choice)
    return choices


def _decided(method: str, facts: Facts, on: set[str]) -> Choice:
    short = _short(facts)
    if short is not None:
        return Choice(method, False, short)
    for other in on:
        against = reason_against(IN_TABLE.get(method, method), IN_TABLE.get(other, other))
        if against is not None:
            return Choice(method, False, f"does not run with {other}: {against}")
    return _RULES[method](facts, on)


def _short(facts: Facts) -> str | None:
    if facts.expected_s is not None:
        if facts.expected_s < SHORT_S:
            return f"the run takes about {facts.expected_s:.0f} s, less than a method needs to pay for its start"
    elif facts.epochs is not None and facts.epochs <= SHORT_EPOCHS:
        return f"with {facts.epochs} epochs the run is over before a method has paid for its start"
    return None


def _freezing(facts: Facts, on: set[str]) -> Choice:
    if facts.pretrained:
        reason = f"the weights are pre-trained: fine-tuning took {_took('tuned', 'freezing')}"
        return Choice("freezing", True, reason)
    if facts.schedule == "steps" and (facts.epochs or 0) >= MIN_EPOCHS_FROM_SCRATCH:
        reason = (
            f"from scratch, the learning rate falls in steps over {facts.epochs} epochs: {_took('steps', 'freezing')}"
        )
        link = facts.slow_link
        if link is not None:
            reason += f"; gradients of frozen layers are not exchanged, and {link}"
        return Choice("freezing", True, reason)
    if facts.schedule == "steps":
        return Choice("freezing", False, f"from scratch, {facts.epochs} epochs are too few for layers to converge")
    if facts.schedule == "constant":
        return Choice("freezing", False, "from scratch at a constant learning rate nothing freezes")
    return Choice("freezing", False, f"from scratch with a smooth schedule it took {_took('smooth', 'freezing')}")


def _cache(facts: Facts, on: set[str]) -> Choice:
    if "freezing" not in on:
        return Choice("cache", False, "without freezing there is no frozen prefix to cache")
    if not facts.pretrained:
        without = f"and without it {_took('steps', 'freezing')}"
        return Choice("cache", False, f"with it, runs from scratch took {_took('steps', 'cache')}, {without}")
    if facts.augmented:
        return Choice("cache", False, "samples are augmented at random, so an entry would serve once")
    if facts.augmented is None:
        return Choice("cache", False, "nobody knows whether samples are augmented at random")
    if "fsdp" in facts.strategy or "ModelParallel" in facts.strategy:
        return Choice("cache", False, f"it is off with {facts.strategy}")
    return Choice(
        "cache", True, f"samples are the same in each epoch: fine-tuning took {_took('tuned', 'cache')} with it"
    )


def _took(kind: str, method: str) -> str:
    least, most = TOOK[kind, method]
    return f"{least:.2f} to {most:.2f} of the time"


def _partial(facts: Facts, on: set[str]) -> Choice:
    if "freezing" in on:
        return Choice("partial", False, "freezing saves the same backward work, with evidence")
    return Choice("partial", False, "no run to an accuracy shows that it pays yet. Ask for it by name")


def _not_shown(method: str, reason: str) -> Callable[[Facts, set[str]], Choice]:
    return lambda facts, on: Choice(method, False, reason)


_RULES: dict[str, Callable[[Facts, set[str]], Choice]] = {
    "freezing": _freezing,
    "cache": _cache,
    "partial": _partial,
    "selective": _not_shown("selective", "no run to an accuracy shows that it pays yet. Ask for it by name"),
    "tuning": _not_shown("tuning", "it changes the settings of the description. Ask for it by name"),
    "goodput": _not_shown("goodput", "it changes the batch size of the description. Ask for it by name"),
}
