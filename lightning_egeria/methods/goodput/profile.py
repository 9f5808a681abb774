"""How long batches take, by where they ran, and the throughput model of these times."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lightning_egeria.cluster.throughput import ThroughputModel, fit

KEPT = 64  # times of each kind and configuration


class Configuration(NamedTuple):
    """Where and how a batch ran.

    Attributes:
        nodes: number of nodes.
        replicas: number of processes.
        local: samples of the batch in one process.
        depth: frozen layer modules.
    """

    nodes: int
    replicas: int
    local: int
    depth: int


def _kept() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclasses.dataclass
class _Times:
    accumulated: deque[float] = dataclasses.field(default_factory=_kept)  # without optimizer step
    stepped: deque[float] = dataclasses.field(default_factory=_kept)
    exchange: deque[float] = dataclasses.field(default_factory=_kept)  # in those with optimizer step

    def medians(self) -> tuple[float, float]:
        """Seconds of a batch without an optimizer step, and with one.

        Without a batch of the one kind, the difference is the exchange of gradients.
        """
        if not self.stepped:
            return float(np.median(self.accumulated)), float(np.median(self.accumulated))
        stepped = float(np.median(self.stepped))
        if self.accumulated:
            return float(np.median(self.accumulated)), stepped
        return stepped - min(float(np.median(self.exchange)), 0.99 * stepped), stepped


class Profile:
    """Measured seconds of batches by configuration. Medians count, so a pause of the machine does not.

    >>> profile = Profile()
    >>> for local in (16, 32):
    ...     profile.add(Configuration(1, 1, local, 0), 0.1 + 0.01 * local, stepped=True)
    >>> [round(value, 3) for value in profile.fit(depth=0).compute]
    [0.1, 0.01]
    """

    def __init__(self) -> None:
        self._times: dict[Configuration, _Times] = {}
        self._fitted: tuple[Any, ThroughputModel | None] = (None, None)  # to which times, and the model

    @property
    def replicas(self) -> int:
        """Most processes that were measured."""
        return max((configuration.replicas for configuration in self._times), default=0)

    def add(self, configuration: Configuration, seconds: float, stepped: bool, exchange: float = 0.0) -> None:
        """Add the time of a batch.

        Args:
            configuration: where it ran.
            seconds: from the end of the batch before to its end, waiting for data included.
            stepped: whether the optimizer stepped with it, and processes exchanged gradients.
            exchange: seconds of it that were spent waiting for gradients of other processes.
        """
        times = self._times.setdefault(configuration, _Times())
        if stepped:
            times.stepped.append(seconds)
            times.exchange.append(exchange)
        else:
            times.accumulated.append(seconds)

    def measured(self, depth: int) -> dict[Configuration, tuple[float, float]]:
        """Return median seconds of a batch without an optimizer step and with one, at a frozen depth.

        What was measured at other depths only is multiplied by the mean ratio of what was measured at both.
        """
        found: dict[Configuration, tuple[float, float]] = {}
        own = {c: times.medians() for c, times in self._times.items() if c.depth == depth}
        for other in sorted({c.depth for c in self._times if c.depth != depth}, key=lambda d: abs(d - depth)):
            there = {c._replace(depth=depth): t.medians() for c, t in self._times.items() if c.depth == other}
            ratios = [own[c][0] / there[c][0] for c in own.keys() & there.keys()]
            if ratios:
                ratio = float(np.mean(ratios))
                found = {c: (times[0] * ratio, times[1] * ratio) for c, times in there.items()} | found
        return found | own

    def fit(self, depth: int) -> ThroughputModel | None:
        """Return the throughput model at a frozen depth; None if nothing was measured there."""
        if not any(configuration.depth == depth for configuration in self._times):
            return None
        measured = self.measured(depth)
        if self._fitted[0] != measured:
            where = np.array([configuration[:3] for configuration in measured])
            seconds = np.array(list(measured.values()))
            self._fitted = measured, fit(where[:, 0], where[:, 1], where[:, 2], seconds[:, 0], seconds[:, 1])
        return self._fitted[1]

    def state(self) -> list[dict[str, Any]]:
        """Return the times, in plain types."""
        return [
            {"where": list(where), **{name: list(kept) for name, kept in vars(times).items()}}
            for where, times in self._times.items()
        ]

    @classmethod
    def from_state(cls, state: list[Mapping[str, Any]]) -> Profile:
        """Return the profile from its `state`."""
        profile = cls()
        for entry in state:
            where = Configuration(*map(int, entry["where"]))
            times = profile._times[where] = _Times()
            for name, kept in vars(times).items():
                kept.extend(float(seconds) for seconds in entry[name])
        return profile
