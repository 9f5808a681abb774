"""Searchers: they are asked for a setting and told how fast it trains, and know nothing of training."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from torch.quasirandom import SobolEngine

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.spaces import Choice, LogUniform, Setting, Space, Uniform, Value

SPREAD = 3  # settings for each tunable that a compass search begins with
DISTANCE = 1 / 6  # share of a space between neighbours in it
NEIGHBOUR_DISTANCES = 1.3  # a setting within this many distances is a neighbour, too
DRAWS = 20  # of a random searcher, to draw a setting that was not tried yet


class Searcher(Protocol):
    """Chooses the settings of one search.

    It may also have ``longer() -> bool``: speeds reported from then on are those of longer trials, and it returns
    whether it may ask for more settings in them.
    """

    def ask(self) -> Setting | None:
        """Return a setting to try next, or None if there is nothing left to try."""

    def tell(self, setting: Setting, speed: float) -> None:
        """Take the speed of a setting that `ask` returned, or of the present one.

        More is better, 0 is none, and below 0 the setting diverged or failed.
        """


SearcherFactory: TypeAlias = Callable[[Mapping[str, Space], int], Searcher]  # of spaces and a seed


class RandomSearcher:
    """Draws settings, each once, that are spread evenly: a scrambled Sobol sequence, so that few cover the spaces.

    Args:
        spaces: the values of each tunable.
        seed: the same settings come for the same seed.

    >>> searcher = RandomSearcher({"momentum": Choice([0.0, 0.9])}, seed=0)
    >>> sorted([searcher.ask()["momentum"], searcher.ask()["momentum"]]), searcher.ask()
    ([0.0, 0.9], None)
    """

    def __init__(self, spaces: Mapping[str, Space], seed: int = 0) -> None:
        self._spaces = dict(spaces)
        self._generator = random.Random(seed)
        self._points = SobolEngine(max(1, len(self._spaces)), scramble=True, seed=seed)
        self._drawn: set[str] = set()

    def ask(self) -> Setting | None:
        """Return a setting that was not drawn before."""
        sizes = [len(space.values) if isinstance(space, Choice) else math.inf for space in self._spaces.values()]
        if len(self._drawn) >= math.prod(sizes):
            return None
        for _ in range(DRAWS * (len(self._drawn) + 1)):
            shares = self._points.draw()[0].tolist()
            setting = {
                name: _at(space, share, self._generator)
                for share, (name, space) in zip(shares, self._spaces.items(), strict=False)
            }
            if repr(setting) not in self._drawn:
                self._drawn.add(repr(setting))
                return setting
        return None

    def tell(self, setting: Setting, speed: float) -> None:
        """Ignore the speed."""


class CompassSearcher:
    """Spreads a few settings, and then tries the neighbours of the fastest, one tunable at a time.

    This is compass search (Kolda, Lewis and Torczon, "Optimization by direct search", SIAM Review 45, 2003) with steps
    of one length. In each round of longer trials it looks around the fastest again: what is fast at first need not be
    so later.

    Args:
        spaces: the values of each tunable.
        seed: the same settings come for the same seed and speeds.

    >>> searcher = CompassSearcher({"lr": LogUniform(1e-6, 1)})
    >>> rates = []
    >>> while (setting := searcher.ask()) is not None:
    ...     rates.append(setting["lr"])
    ...     searcher.tell(setting, 1 / (1 + abs(math.log10(setting["lr"] / 3e-3))))
    >>> len(rates), min(abs(math.log10(rate / 3e-3)) for rate in rates) < 0.5
    (5, True)
    """

    def __init__(self, spaces: Mapping[str, Space], seed: int = 0) -> None:
        self._spaces = dict(spaces)
        self._spread = self._hypercubes(random.Random(seed))
        self._left = SPREAD * len(self._spaces)
        self._told: list[tuple[float, Setting]] = []  # of trials of this length, and what diverged in any
        self._tried: list[Setting] = []  # in trials of any length

    def ask(self) -> Setting | None:
        """Return a setting that this round has not tried, or None.

        None is left if the fastest has neighbours on all sides, or none makes progress: longer trials tell more. While
        all diverge, further ones are spread.
        """
        self._left -= 1
        speed, fastest = max(self._told, key=lambda told: told[0], default=(-1.0, {}))
        if self._left < 0 and speed >= 0:
            return next(self._around(fastest), None) if speed > 0 else None
        return next((setting for setting in itertools.islice(self._spread, DRAWS) if setting not in self._tried), None)

    def tell(self, setting: Setting, speed: float) -> None:
        """Take the speed."""
        self._told.append((speed, dict(setting)))
        self._tried.append(dict(setting))

    def longer(self) -> bool:
        """Forget the speeds of the trials so far, which were shorter; what diverged diverges again."""
        self._told = [told for told in self._told if told[0] < 0]
        return any(not isinstance(space, Choice) for space in self._spaces.values())

    def _hypercubes(self, generator: random.Random) -> Iterator[Setting]:
        """Yield settings that are spread over each space: Latin hypercubes, one after another."""
        count = SPREAD * len(self._spaces)
        while True:
            for places in zip(*(generator.sample(range(count), count) for _ in self._spaces), strict=True):
                yield {
                    name: _at(space, (place + generator.random()) / count, generator)
                    for place, (name, space) in zip(places, self._spaces.items(), strict=True)
                }

    def _around(self, setting: Setting) -> Iterator[Setting]:
        for name, space in self._spaces.items():
            if isinstance(space, Choice):  # each value once: no trial of one tells of another
                beside = ({**setting, name: value} for value in space.values)
                yield from (one for one in beside if one not in self._tried)
            elif isinstance(space, Uniform):  # other spaces have no neighbours
                others = {**setting, name: None}
                tried = [one[name] for _, one in self._told if {**one, name: None} == others]
                here, *shares = (min(max(space.share(float(one)), 0.0), 1.0) for one in (setting[name], *tried))
                for step in (DISTANCE, -DISTANCE):
                    there = min(max(here + step, 0.0), 1.0)
                    if abs(there - here) > DISTANCE / 2 and not any(
                        0 < (at - here) / step <= NEIGHBOUR_DISTANCES for at in shares
                    ):
                        yield {**setting, name: space.at(there)}


class GridSearcher:
    """Goes through a grid in an order that covers it evenly from the start.

    Args:
        spaces: the values of each tunable.
        seed: the same order comes for the same seed.
        points: values of each space that is no list.

    >>> searcher = GridSearcher({"lr": LogUniform(0.01, 1)}, points=3)
    >>> sorted(round(searcher.ask()["lr"], 3) for _ in range(3)), searcher.ask()
    ([0.01, 0.1, 1.0], None)
    """

    def __init__(self, spaces: Mapping[str, Space], seed: int = 0, points: int = 7) -> None:
        names, grids = list(spaces), [space.grid(points) for space in spaces.values()]
        self._left = [dict(zip(names, values, strict=True)) for values in itertools.product(*grids)]
        random.Random(seed).shuffle(self._left)

    def ask(self) -> Setting | None:
        """Return the next setting of the grid."""
        return self._left.pop() if self._left else None

    def tell(self, setting: Setting, speed: float) -> None:
        """Ignore the speed."""


class OptunaSearcher:
    """Asks a sampler of Optuna (extra ``tune``).

    Args:
        spaces: the values of each tunable.
        seed: seed of the sampler.
        sampler: ``"tpe"``, ``"cmaes"``, ``"random"``, or a function from a seed to a sampler.

    Raises:
        ArgumentError: if Optuna is not installed, there is no such sampler, or a space is not one of this package.
    """

    def __init__(self, spaces: Mapping[str, Space], seed: int = 0, sampler: str | Callable[[int], Any] = "tpe") -> None:
        optuna = _optuna()
        self._distributions = {name: _distribution(optuna, name, space) for name, space in spaces.items()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        made = _sampler(optuna, sampler, seed) if isinstance(sampler, str) else sampler(seed)
        self._study = optuna.create_study(direction="maximize", sampler=made)
        self._asked: dict[str, list[Any]] = {}  # trials of Optuna without an answer, by setting
        self._speeds: dict[str, float] = {}
        self._most = math.prod(
            len(space.values) if isinstance(space, Choice) else math.inf for space in spaces.values()
        )

    def ask(self) -> Setting | None:
        """Return a setting that was not asked before; a sampler that repeats a setting gets the speed from before."""
        for _ in range(DRAWS):
            if len(self._speeds) + len(self._asked) >= self._most:
                return None
            trial = self._study.ask(self._distributions)
            setting = {name: trial.params[name] for name in self._distributions}
            key = repr(setting)
            if key in self._speeds:
                self._study.tell(trial, self._speeds[key])
                continue
            self._asked.setdefault(key, []).append(trial)
            if len(self._asked[key]) == 1:
                return setting
        return None

    def tell(self, setting: Setting, speed: float) -> None:
        """Pass the speed on to the sampler."""
        key = repr(setting)
        for trial in self._asked.pop(key, []):
            self._speeds[key] = speed
            self._study.tell(trial, speed)


SEARCHERS: dict[str, SearcherFactory] = {
    "compass": CompassSearcher,
    "random": RandomSearcher,
    "grid": GridSearcher,
    "tpe": OptunaSearcher,
    "cmaes": lambda spaces, seed: OptunaSearcher(spaces, seed, "cmaes"),
}


def _at(space: Space, share: float, generator: random.Random) -> Value:
    """Return the value at a share of a space; of a space that has no order, any."""
    return space.at(share) if isinstance(space, Choice | Uniform) else space.draw(generator)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "this searcher needs Optuna: pip install 'lightning-egeria[tune]', or use 'compass', 'random' or 'grid'"
        ) from error
    return optuna


def _sampler(optuna: Any, name: str, seed: int) -> Any:
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    raise ArgumentError(f"sampler must be 'tpe', 'cmaes', 'random' or a function from a seed, got {name!r}")


def _distribution(optuna: Any, name: str, space: Space) -> Any:
    if isinstance(space, Choice):
        return optuna.distributions.CategoricalDistribution(space.values)
    if isinstance(space, Uniform):
        return optuna.distributions.FloatDistribution(space.low, space.high, log=isinstance(space, LogUniform))
    raise ArgumentError(f"Optuna knows Choice, Uniform and LogUniform, but the space of {name!r} is {space!r}")
