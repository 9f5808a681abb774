"""When to tune again: validation that has not got better for some epochs."""

from __future__ import annotations

import enum
import math

from lightning_egeria.errors import ArgumentError, check_integers


class Advice(enum.Enum):
    """What to do after a validation."""

    GO_ON = "go on"
    TUNE = "tune"
    STOP = "stop"


class Plateau:
    """Counts validations since the best one.

    Args:
        mode: ``"min"`` if less is better, or ``"max"``.
        patience: validations without a better one after which to tune again; and again after as many more.
        stop_patience: validations without a better one after which to end training; None never ends it.

    Attributes:
        best: best value so far; None before the first.
        waited: validations since the best one.

    Raises:
        ArgumentError: if an argument is out of range.

    >>> plateau = Plateau("min", patience=2, stop_patience=3)
    >>> [plateau.update(value).value for value in (1.0, 0.9, 0.9, 0.95, 0.92)]
    ['go on', 'go on', 'go on', 'tune', 'stop']
    """

    def __init__(self, mode: str = "min", patience: int = 4, stop_patience: int | None = None) -> None:
        if mode not in ("min", "max"):
            raise ArgumentError(f"mode must be 'min' or 'max', got {mode!r}")
        check_integers(1, patience=patience)
        if stop_patience is not None:
            check_integers(1, stop_patience=stop_patience)
        self._sign = 1 if mode == "min" else -1
        self._patience = patience
        self._stop_patience = stop_patience
        self.best: float | None = None
        self.waited = 0

    def update(self, value: float) -> Advice:
        """Return what to do after a validation. NaN is never better.

        Args:
            value: the monitored metric.
        """
        if not math.isnan(value) and (self.best is None or self._sign * value < self._sign * self.best):
            self.best, self.waited = value, 0
            return Advice.GO_ON
        self.waited += 1
        if self._stop_patience is not None and self.waited >= self._stop_patience:
            return Advice.STOP
        return Advice.TUNE if self.waited % self._patience == 0 else Advice.GO_ON
