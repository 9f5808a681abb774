"""The record of a search, in plain types."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lightning_egeria.tuning.spaces import Setting


@dataclasses.dataclass(frozen=True)
class SearchRecord:
    """One search.

    Attributes:
        step: optimizer steps of training before it.
        reason: why it began.
        ended: why it ended.
        branches: for each branch its setting, steps, speed, label, range, noise, and why it failed.
        winner: number of the branch that training went on from; None if none made progress.
        trial_steps: steps of the winner's trial, of its batch size; of the last trial without a winner.
        seconds: time that the search took.
        setting: setting in use after it.
        unlearned_steps: optimizer steps whose weights were put back: what the loss of each batch is without learning.
    """

    step: int
    reason: str
    ended: str
    branches: list[dict[str, Any]]
    winner: int | None
    trial_steps: int
    seconds: float
    setting: Setting
    unlearned_steps: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of all branches, and those without learning."""
        steps: int = sum(branch["steps"] for branch in self.branches)
        return steps + self.unlearned_steps

    def state(self) -> dict[str, Any]:
        """Return the record in plain types; a number that is not finite is None."""
        branches = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in one.items()
            }
            for one in self.branches
        ]
        return {**vars(self), "branches": branches, "setting": dict(self.setting)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SearchRecord:
        """Return the record of `state`."""
        return cls(**{**state, "branches": [dict(one) for one in state["branches"]], "setting": dict(state["setting"])})


def describe(setting: Setting) -> str:
    """Return a setting in a few characters.

    >>> describe({"lr": 0.0123456, "batch_size": 32})
    'lr=0.0123, batch_size=32'
    """
    shown = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in setting.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())
