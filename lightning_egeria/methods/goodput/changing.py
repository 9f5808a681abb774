"""Changing the batch size of a running Trainer: agreed on by all processes, tried in memory, at a step's beginning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import RowsError
from lightning_egeria.methods.goodput.control import BatchSizeChange, BatchSizeControl
from lightning_egeria.methods.goodput.decision import Division
from lightning_egeria.methods.goodput.memory import enlarged, fits_in_memory


@dataclasses.dataclass(frozen=True)
class PlannedChange:
    """A change on its way.

    Attributes:
        at: number of the batch in the epoch from which on it holds.
        division: the batch size.
        reason: why.
    """

    at: int
    division: Division
    reason: str


class BatchSizeChanges:
    """The batch size of a Trainer, and the change of it that is on its way.

    A change holds from the first batch that no worker was asked for, where a step begins with the old and with the new
    number of batches in a step; at the latest in the next epoch.

    Args:
        trainer: the Trainer.
        control: decides.
        ranks: the processes.
        now: batch size at the start.
        notices: takes log lines and warnings.

    Attributes:
        now: the batch size of the step in progress.
        planned: the change on its way; None without one.
    """

    def __init__(
        self, trainer: pl.Trainer, control: BatchSizeControl, ranks: Ranks, now: Division, notices: Notices
    ) -> None:
        self.now = now
        self.planned: PlannedChange | None = None
        self._trainer, self._control, self._ranks, self._notices = trainer, control, ranks, notices
        self._largest_tried = now.local
        self._accumulation_before = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = now.batches

    def decide(self, step: int, adapted: AdaptedLoader, batch: Any, samples: int, batch_idx: int) -> None:
        """Ask for the next batch size and plan the change to it. Every rank must call it after the same step.

        Args:
            step: number of optimizer steps so far.
            adapted: the training data.
            batch: the last batch, to try a larger one.
            samples: number of its samples.
            batch_idx: its number in the epoch.
        """
        control = self._control
        if self.planned is not None or not control.decides(step):
            return
        if control.decides_alike:
            division = control.next(step, self.now)
        else:
            control.wait(step)
            found = control.next(step, self.now) if self._ranks.leads else None
            shared = self._ranks.share([found.local, found.batches] if found is not None else None)
            division = Division(shared[0], shared[1], self.now.replicas) if shared is not None else None
        if division is None or division == self.now or not self._fits(division, step, batch, samples, batch_idx):
            return
        drawn = int(self._ranks.largest(adapted.batches.drawn))
        at = _next_multiple(drawn, math.lcm(self.now.batches, division.batches))
        self.plan(PlannedChange(at, division, self._reason(division)), adapted)

    def plan(self, change: PlannedChange, adapted: AdaptedLoader) -> None:
        """Let a change come."""
        self.planned = change
        adapted.batches.change(change.division.local, change.at)
        adapted.tell_length()

    def reach(self, batch: int, step: int) -> BatchSizeChange | None:
        """Batch ``batch`` of the epoch comes next: make the change if it is planned for it."""
        planned = self.planned
        if planned is None or batch < planned.at:
            return None
        self.planned, self.now = None, planned.division
        self._largest_tried = max(self._largest_tried, self.now.local)
        self._trainer.accumulate_grad_batches = self.now.batches
        return self._control.changed(step, self.now, planned.reason)

    def epoch_ended(self, step: int) -> BatchSizeChange | None:
        """The epoch is over: a change that is planned holds from the next one's first batch."""
        return self.reach(self.planned.at, step) if self.planned is not None else None

    def close(self) -> None:
        """Return the Trainer's setting."""
        self._trainer.accumulate_grad_batches = self._accumulation_before

    def state(self) -> dict[str, Any]:
        """Return batch size and planned change, in plain types."""
        planned = self.planned
        return {
            "now": dataclasses.asdict(self.now),
            "planned": None
            if planned is None
            else {"at": planned.at, "reason": planned.reason, **dataclasses.asdict(planned.division)},
        }

    def _fits(self, division: Division, step: int, batch: Any, samples: int, batch_idx: int) -> bool:
        """Try a batch that is larger than any so far; all ranks return the same."""
        if division.local <= self._largest_tried:
            return True
        try:
            larger = enlarged(batch, samples, division.local)
        except RowsError:
            self._notices.warn(
                "no part of the batch has one row for each sample, so larger batches are not tried in memory before "
                "they are used. Set local_batch_sizes to what fits",
                once="not tried",
            )
            return True
        fits = fits_in_memory(self._trainer, larger, batch_idx)
        if isinstance(fits, Exception):
            # Its samples came more than once, which the training step may not take.
            self._notices.warn(
                f"step {step}: a batch of {division.local} samples could not be tried in memory: "
                f"{type(fits).__name__}: {fits}. The larger batch is used anyway",
                once="not tried",
            )
        if all(value == 1.0 for value in self._ranks.mean([float(fits is not False)])):
            self._largest_tried = division.local
            return True
        self._control.out_of_memory = division.local
        self._notices.inform(
            f"step {step}: a batch of {division.local} samples does not fit in memory and will not be tried again"
        )
        return False

    def _reason(self, division: Division) -> str:
        if self._control.decides_alike:
            return "as scheduled"
        if not self._ranks.leads:
            return ""
        before, after = self._control.estimate(self.now), self._control.estimate(division)
        if before is None or after is None:
            return ""
        return (
            f"goodput {after.goodput:.4g} instead of {before.goodput:.4g} samples/s at a noise scale of "
            f"{self._control.noise.scale * self._control.initial:.4g} samples"
        )


def planned_of(state: Mapping[str, Any] | None) -> PlannedChange | None:
    """Return the planned change of a `BatchSizeChanges.state`."""
    if state is None:
        return None
    division = Division(int(state["local"]), int(state["batches"]), int(state["replicas"]))
    return PlannedChange(int(state["at"]), division, str(state["reason"]))


def _next_multiple(least: int, step: int) -> int:
    return -(-least // step) * step
