"""The values that a tunable may take."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from lightning_egeria.errors import ArgumentError

Value: TypeAlias = bool | int | float | str
Setting: TypeAlias = dict[str, Value]  # a value for each tunable, by name


class Space(Protocol):
    """A set of values."""

    def draw(self, generator: random.Random) -> Value:
        """Return a random value."""

    def grid(self, points: int) -> list[Value]:
        """Return values in equal distances, ``points`` of them at most unless the space is a list."""


def plain(value: Any) -> Any:
    """Return a number of numpy as one of Python, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


class Choice:
    """One value of a list.

    Args:
        values: numbers, strings or booleans, each once.

    Raises:
        ArgumentError: if the list is empty, or a value has another type or is in the list twice.

    >>> Choice([32, 64]).grid(10)
    [32, 64]
    """

    def __init__(self, values: Sequence[Value]) -> None:
        self.values: list[Value] = [*map(plain, values)] if isinstance(values, list | tuple | range) else []
        known = all(
            type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)) for value in self.values
        )
        if not known or not self.values or len(set(self.values)) < len(self.values):
            raise ArgumentError(
                f"Choice needs a list of different numbers, strings or booleans, got {values!r}. For another kind of "
                "value, choose between names and use CustomTunable with a setter"
            )

    def at(self, share: float) -> Value:
        """Return the value at a share of the list, in [0, 1)."""
        return self.values[int(share * len(self.values))]

    def draw(self, generator: random.Random) -> Value:
        """Return one of the values."""
        return self.at(generator.random())

    def grid(self, points: int) -> list[Value]:
        """Return all values."""
        return list(self.values)


class Uniform:
    """A number from ``low`` to ``high``.

    Args:
        low: smallest value.
        high: largest value.

    Raises:
        ArgumentError: if ``low`` is not below ``high``.
    """

    def __init__(self, low: float, high: float) -> None:
        low, high = plain(low), plain(high)
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in (low, high))
        if not (numbers and low < high):
            raise ArgumentError(f"{type(self).__name__} needs finite low < high, got {low!r} and {high!r}")
        self.low, self.high = float(low), float(high)

    def at(self, share: float) -> Value:
        """Return the number at a share of the way, in [0, 1)."""
        return self.low + share * (self.high - self.low)

    def share(self, value: float) -> float:
        """Return the share that `at` has for a number."""
        return (value - self.low) / (self.high - self.low)

    def draw(self, generator: random.Random) -> Value:
        """Return a number, each with the same probability."""
        return self.at(generator.random())

    def grid(self, points: int) -> list[Value]:
        """Return numbers in equal distances, with both ends; the middle if it is one."""
        return [self.at(share) for share in _shares(points)]


class LogUniform(Uniform):
    """A positive number from ``low`` to ``high``; each factor has the same probability.

    Raises:
        ArgumentError: if ``low`` is not positive and below ``high``.

    >>> [round(value, 3) for value in LogUniform(0.001, 1).grid(4)]
    [0.001, 0.01, 0.1, 1.0]
    """

    def __init__(self, low: float, high: float) -> None:
        super().__init__(low, high)
        if low <= 0:
            raise ArgumentError(f"LogUniform needs a positive low, got {low!r}")

    def at(self, share: float) -> Value:
        """Return the number at a share of the way of its logarithm, in [0, 1)."""
        value: float = self.low * (self.high / self.low) ** share
        return min(max(value, self.low), self.high)

    def share(self, value: float) -> float:
        """Return the share that `at` has for a number; minus infinity for one that has no logarithm."""
        return -math.inf if value <= 0 else math.log(value / self.low) / math.log(self.high / self.low)

    def grid(self, points: int) -> list[Value]:
        """Return numbers in equal ratios, with both ends; the middle if it is one."""
        return [self.at(share) for share in _shares(points)]


def _shares(points: int) -> list[float]:
    return [number / (points - 1) for number in range(points)] if points > 1 else [0.5]
