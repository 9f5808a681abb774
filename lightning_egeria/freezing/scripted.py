"""A policy that freezes and unfreezes at given steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_egeria.core.training.checkpoints import checkpoint_read, count_of, is_whole
from lightning_egeria.core.training.freezer import Decision
from lightning_egeria.errors import ArgumentError


class ScriptedPolicy:
    """Freezes and unfreezes at the steps you give.

    Args:
        schedule: frozen depth by optimizer step. ``{200: 4, 900: 0}`` freezes the first four layer modules after
            step 200 and unfreezes them after step 900. With several processes, after the next evaluation step.

    Raises:
        ArgumentError: if a step is below 1 or a depth is negative. At the start of training, if a depth is larger than
            the model allows.

    >>> policy = ScriptedPolicy({200: 4, 900: 0})
    >>> policy.observe(200, None, learning_rate=0.1, loss=None)
    Decision(depth=4, reason='scheduled for step 200')
    """

    wants_reference = holds_reference = False

    def __init__(self, schedule: Mapping[int, int]) -> None:
        given: object = schedule
        if not isinstance(given, Mapping):
            raise ArgumentError(f"schedule must map steps to depths, got {given!r}")
        for step, depth in schedule.items():
            if not (is_whole(step, least=1) and is_whole(depth, least=0)):
                raise ArgumentError(
                    "schedule needs integer steps of at least 1 and integer depths of at least 0, got "
                    f"{{{step!r}: {depth!r}}}"
                )
        self.schedule = dict(sorted(schedule.items()))
        self._done = 0

    def start(self, max_depth: int) -> None:
        """Check the schedule against the model."""
        deepest = max(self.schedule.values(), default=0)
        if deepest > max_depth:
            raise ArgumentError(f"schedule freezes to depth {deepest}, but this model allows at most {max_depth}")

    def observe(
        self,
        step: int,
        plasticity: Sequence[float] | None,
        learning_rate: float,
        loss: float | None,
        layer_shares: Sequence[float] | None = None,
    ) -> Decision | None:
        """Return the last entry of the schedule up to ``step``; arguments as for `Policy.observe`."""
        due = [entry for entry in self.schedule if self._done < entry <= step]
        if not due:
            return None
        self._done = due[-1]
        return Decision(self.schedule[self._done], f"scheduled for step {self._done}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            CheckpointError: if the state is damaged.
        """
        with checkpoint_read():
            self._done = count_of(state["done"])
