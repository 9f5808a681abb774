"""Which methods a job trains with, and why: pure rules over what is known of the job and what the proof measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.jobs.evidence import cache_adds, evidence, least, pays

KINDS = {
    "tuned": "fine-tuning",
    "steps": "from scratch, the learning rate falls in steps",
    "smooth": "from scratch with a smooth schedule",
    "constant": "from scratch at a constant learning rate",
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an earlier run of the same code on the same data cost.

    Attributes:
        fit_s: seconds of the whole run.
        epochs: epochs of that run.
    """

    fit_s: float
    epochs: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a job before it runs; None for what is not known.

    Attributes:
        trains: whether `egeria-train` runs it.
        pretrained: whether the weights are trained already.
        own_model: whether the model is not one of this package, so that parts of it may be frozen.
        epochs: epochs of the run.
        schedule: of the learning rate: ``"steps"``, ``"smooth"`` or ``"constant"``.
        augmented: whether samples are drawn at random in each epoch.
        ranks: processes that train.
        strategy: Lightning's name of the strategy.
        measured: costs of an earlier run.
    """

    trains: bool
    pretrained: bool | None = None
    own_model: bool = False
    epochs: int | None = None
    schedule: str | None = None
    augmented: bool | None = None
    ranks: int = 1
    strategy: str = "auto"
    measured: Measured | None = None

    @property
    def kind(self) -> str:
        """Which comparisons of the evidence are like this run: ``"tuned"``, or the schedule from scratch."""
        return "tuned" if self.pretrained else self.schedule or "smooth"

    @property
    def expected_s(self) -> float | None:
        """Seconds that the run will take, from the earlier one; None without."""
        if self.measured is None or self.epochs is None:
            return None
        return self.measured.fit_s / max(self.measured.epochs, 1) * self.epochs


@dataclasses.dataclass(frozen=True)
class Choice:
    """Whether a method is on, with which options, and why."""

    method: str
    on: bool
    reason: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def choose(wanted: Any, facts: Facts) -> list[Choice]:
    """Choose the methods of a job.

    Args:
        wanted: ``"auto"``, ``"none"``, or the methods that the description asks for or refuses; the others stay off.
        facts: what is known of the job.

    Returns:
        A choice for each method of `CONFIGURABLE`, in its order.
    """
    choices: list[Choice] = []
    for method in CONFIGURABLE:
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
            choice = Choice(method, *_decided(method, facts, [other.method for other in choices if other.on]))
        choices.append(choice)
    return choices


def _decided(method: str, facts: Facts, on: list[str]) -> tuple[bool, str]:
    """Return whether a method is on, and why. One that no rule names pays or does not by its own comparisons."""
    if (short := _short(facts)) is not None:
        return False, short
    if method == "cache":
        return _cache(facts, "freezing" in on)
    found, figures = pays(facts.kind, [method])
    for other in on if found else ():
        against = CONFIGURABLE[method].reason_against(CONFIGURABLE[other])
        if against is not None:
            return False, f"does not run with {other}: {against}"
    return found, f"{KINDS[facts.kind]}: {figures}"


def _short(facts: Facts) -> str | None:
    epochs, seconds = least("epochs", facts.kind), least("plain_s", facts.kind)
    if facts.expected_s is not None and seconds is not None and facts.expected_s < seconds:
        return f"the run takes about {facts.expected_s:.0f} s; the shortest one that was measured took {seconds:.0f} s"
    if facts.epochs is not None and epochs is not None and facts.epochs < epochs:
        return f"the run has {facts.epochs} epochs; the shortest one that was measured had {epochs:.0f}"
    return None


def _cache(facts: Facts, freezing: bool) -> tuple[bool, str]:
    if "fsdp" in facts.strategy.lower() or "ModelParallel" in facts.strategy:
        return False, f"it is off with {facts.strategy}"
    if freezing:
        found, figures = cache_adds(facts.kind, bool(facts.augmented))
        samples = "augmented at random" if facts.augmented else "not augmented"
        return found, f"{KINDS[facts.kind]}, samples {samples}: {figures}"
    if facts.augmented:
        return False, "samples are augmented at random, so an entry would serve once"
    if facts.own_model:
        most = evidence()["cache_costs_s"]
        return True, f"modules that the model keeps frozen are not run again; without any it cost {most:g} s at most"
    return False, "nothing freezes, and the models of this package keep no module frozen"
