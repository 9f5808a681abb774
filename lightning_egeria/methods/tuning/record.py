"""The record of a search, in plain types."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lightning_egeria.methods.tuning.spaces import Setting


@dataclasses.dataclass(frozen=True)
class SearchRecord:
    """The record of one search.

    Attributes:
        step: optimizer steps of training before the search.
        reason: why the search began.
        ended: why the search ended.
        branches: for each branch its setting, steps, speed, label, range, noise, and why it failed.
        winner: number of the branch from which training continued; None if no branch made progress.
        trial_steps: steps of the winner's trial, in its batch size; without a winner, steps of the last trial.
        seconds: duration of the search.
        setting: setting in use after the search.
        unlearned_steps: optimizer steps of the control branch, which undoes its weight updates.
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
