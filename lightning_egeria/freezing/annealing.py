"""When frozen layer modules train again: where the learning rate jumps."""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning_egeria.core.training.checkpoints import number_of
from lightning_egeria.core.training.freezer import Decision
from lightning_egeria.errors import ArgumentError


class Annealing:
    """Base of policies that unfreeze everything when the learning rate jumps.

    Args:
        unfreeze_on: ``"annealing"`` unfreezes everything when the learning rate jumps, ``"never"`` does not.
        unfreeze_lr_factor: drop of the learning rate within one step that unfreezes, or its inverse as a rise; in
            (0, 1).

    Raises:
        ArgumentError: if an argument is out of range.
    """

    def __init__(self, unfreeze_on: Literal["annealing", "never"], unfreeze_lr_factor: float) -> None:
        if unfreeze_on not in ("annealing", "never"):
            raise ArgumentError(f"unfreeze_on must be 'annealing' or 'never', got {unfreeze_on!r}")
        if not 0 < unfreeze_lr_factor < 1:
            raise ArgumentError(f"unfreeze_lr_factor must be in (0, 1), got {unfreeze_lr_factor}")
        self.unfreeze_on = unfreeze_on
        self.unfreeze_lr_factor = unfreeze_lr_factor
        self._previous_lr: float | None = None
        self._lr_at_freeze: float | None = None

    def is_annealing_event(self, previous: float, learning_rate: float, at_freeze: float) -> bool:
        """Whether the learning rate jumped so far that frozen layers should train again.

        Override it for your own schedule. A jump between two rates that are both small compared with ``at_freeze`` does
        not count: at the end of a smooth schedule, or the turn of a periodic one, tiny rates differ by large factors.

        Args:
            previous: learning rate of the step before.
            learning_rate: learning rate now.
            at_freeze: learning rate when the first of the frozen layer modules froze.
        """
        factor = self.unfreeze_lr_factor * (1 + 1e-6)  # 0.1 * 0.1 is not 0.01 in floating point
        fell = 0 < learning_rate <= factor * min(previous, at_freeze) and previous > factor * at_freeze
        rose = previous <= factor * learning_rate and learning_rate > factor * at_freeze
        return fell or rose

    def _jumped(self, learning_rate: float) -> Decision | None:
        """Return the decision to unfreeze everything if the learning rate jumped. Call it at every step."""
        if math.isnan(learning_rate):
            return None
        before, self._previous_lr = self._previous_lr, learning_rate
        if before is None or self._lr_at_freeze is None or self.unfreeze_on == "never":
            return None
        if not self.is_annealing_event(before, learning_rate, self._lr_at_freeze):
            return None
        self._lr_at_freeze = None
        return Decision(0, f"learning rate jumped from {before:.2e} to {learning_rate:.2e}")

    def _froze(self, learning_rate: float) -> None:
        """Remember the learning rate at the first freeze."""
        if self._lr_at_freeze is None and not math.isnan(learning_rate):
            self._lr_at_freeze = learning_rate

    def _load_rates(self, state: dict[str, Any]) -> None:
        before, at_freeze = state["previous_lr"], state["lr_at_freeze"]
        self._previous_lr = None if before is None else number_of(before)
        self._lr_at_freeze = None if at_freeze is None else number_of(at_freeze)
