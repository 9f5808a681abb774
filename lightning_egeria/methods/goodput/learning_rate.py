"""How the learning rate follows the batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.goodput.noise import GradientNoise


class LearningRateRule(Protocol):
    """Returns factors for the learning rates of a step."""

    def factors(self, scale: float, noise: GradientNoise, epochs: float) -> NDArray[np.float64] | float:
        """Return the factor of each parameter group, or one for all.

        Args:
            scale: batch size of the step, in initial batch sizes.
            noise: of the gradients so far.
            epochs: scale-invariant epochs so far: progress over the initial steps of an epoch.
        """


class AdaScale:
    """The gain of each parameter group: between 1 and the scale (Johnson et al., arXiv:2007.05105). For SGD."""

    def factors(self, scale: float, noise: GradientNoise, epochs: float) -> NDArray[np.float64] | float:
        """As `LearningRateRule`."""
        return noise.gains(scale) if noise.known else 1.0


class SquareRoot:
    """The square root of the scale (Krizhevsky, arXiv:1404.5997). For Adam and its like."""

    def factors(self, scale: float, noise: GradientNoise, epochs: float) -> NDArray[np.float64] | float:
        """As `LearningRateRule`."""
        return float(np.sqrt(scale))


class Linear:
    """The scale (Goyal et al., arXiv:1706.02677, without their warm-up)."""

    def factors(self, scale: float, noise: GradientNoise, epochs: float) -> NDArray[np.float64] | float:
        """As `LearningRateRule`."""
        return scale


class Constant:
    """1: the learning rate does not follow."""

    def factors(self, scale: float, noise: GradientNoise, epochs: float) -> NDArray[np.float64] | float:
        """As `LearningRateRule`."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LEGW:
    """The square root of the scale, reached linearly over ``warmup_epochs * scale`` (You et al., arXiv:1901.08256).

    Attributes:
        warmup_epochs: epochs of warm-up at the initial batch size.

    Raises:
        ArgumentError: if it is below 0.
    """

    warmup_epochs: float = 1.0

    def __post_init__(self) -> None:
        if not self.warmup_epochs >= 0:
            raise ArgumentError(f"warmup_epochs must be at least 0, got {self.warmup_epochs!r}")

    def factors(self, scale: float, noise: GradientNoise, epochs: float) -> NDArray[np.float64] | float:
        """As `LearningRateRule`."""
        warm = self.warmup_epochs * scale
        return float(np.sqrt(scale) * min(1.0, epochs / warm if warm else 1.0))


RULES: dict[str, Callable[[], LearningRateRule]] = {
    "adascale": AdaScale,
    "sqrt": SquareRoot,
    "linear": Linear,
    "legw": LEGW,
    "none": Constant,
}


def rule_of(learning_rate: str | LearningRateRule, adaptive: bool) -> LearningRateRule:
    """Return the rule for an argument.

    Args:
        learning_rate: a name of `RULES`, ``"auto"``, or a rule.
        adaptive: whether the optimizer is Adam or its like, for ``"auto"``.

    Raises:
        ArgumentError: if there is no such rule.

    >>> type(rule_of("auto", adaptive=True)).__name__, type(rule_of("auto", adaptive=False)).__name__
    ('SquareRoot', 'AdaScale')
    """
    if learning_rate == "auto":
        return SquareRoot() if adaptive else AdaScale()
    if callable(getattr(learning_rate, "factors", None)) and not isinstance(learning_rate, type):
        return learning_rate  # type: ignore[return-value]  # a rule, by its method
    if not isinstance(learning_rate, str) or learning_rate not in RULES:
        raise ArgumentError(
            f"learning_rate must be 'auto', one of {', '.join(RULES)}, or a rule, got {learning_rate!r}"
        )
    return RULES[learning_rate]()
