"""What a run froze and what that saved: as numbers, as a table, as pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_egeria.report.record import RunRecord
from lightning_egeria.report.savings import LayerModuleSavings, Savings, savings_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LayerModuleSavings", "RunRecord", "Savings", "figures", "savings_table"]

Run = RunRecord | str | os.PathLike[str]


def figures(runs: Run | Sequence[Run], metric: str | None = None) -> dict[str, Figure]:
    """Pictures of one or more runs by name, for notebooks; needs the extra ``lightning-egeria[report]``.

    Args:
        runs: what `RunRecorder` has recorded (its ``record``), or the directories in which it has written. With more
            than one, the first is what the others are compared with.
        metric: logged metric to compare runs by; None takes an accuracy, or what they have in common.

    Returns:
        ``plasticity``, ``depth``, ``step_time``, ``phases``, ``cache`` and ``accuracy``, as far as there is something
        to draw.

    Raises:
        RecordError: a record cannot be read, or the runs have no metric in common.
    """
    from lightning_egeria.report.drawing import figures_of  # matplotlib takes a second to import

    several = [runs] if isinstance(runs, (RunRecord, str, os.PathLike)) else list(runs)
    return figures_of([run if isinstance(run, RunRecord) else RunRecord.read(run) for run in several], metric)
