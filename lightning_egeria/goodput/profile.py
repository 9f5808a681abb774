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


@dataclasses.dataclass
class _Times:
    accumulated: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))  # without optimizer step
    stepped: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))

    def medians(self) -> tuple[float, float]:
        """Seconds of a batch without an optimizer step, and with one; each stands for the other if there is none."""
        either = [float(np.median(times)) if times else 0.0 for times in (self.accumulated, self.stepped)]
        return either[0] or either[1], either[1] or either[0]


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

    @property
    def replicas(self) -> int:
        """Most processes that were measured."""
        return max((configuration.replicas for configuration in self._times), default=0)

    def add(self, configuration: Configuration, seconds: float, stepped: bool) -> None:
        """Add the time of a batch.

        Args:
            configuration: where it ran.
            seconds: from the end of the batch before to its end, waiting for data included.
            stepped: whether the optimizer stepped with it, and processes exchanged gradients.
        """
        times = self._times.setdefault(configuration, _Times())
        (times.stepped if stepped else times.accumulated).append(seconds)

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
        where = np.array([configuration[:3] for configuration in measured])
        seconds = np.array(list(measured.values()))
        return fit(where[:, 0], where[:, 1], where[:, 2], seconds[:, 0], seconds[:, 1])

    def state(self) -> list[dict[str, Any]]:
        """Return the times, in plain types."""
        return [
            {"where": list(where), "accumulated": list(times.accumulated), "stepped": list(times.stepped)}
            for where, times in self._times.items()
        ]

    @classmethod
    def from_state(cls, state: list[Mapping[str, Any]]) -> Profile:
        """Return the profile from its `state`."""
        profile = cls()
        for entry in state:
            where = Configuration(*map(int, entry["where"]))
            for stepped, name in enumerate(("accumulated", "stepped")):
                for seconds in entry[name]:
                    profile.add(where, float(seconds), bool(stepped))
        return profile
