"""Figures and reports of runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_egeria.report.naming import with_short_names
from lightning_egeria.report.record import RunRecord, record_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RunRecord", "figures"]

Run = RunRecord | str | os.PathLike[str]


def figures(runs: Run | Sequence[Run], metric: str | None = None) -> dict[str, Figure]:
    """Figures of one or more runs, by name; needs the extra ``lightning-egeria[report]``.

    Args:
        runs: records of `RunRecorder` (its ``record``), or the directories that it wrote to. With several runs, the
            first is the one to compare the others with.
        metric: logged metric to compare runs by; None takes one that all runs have, an accuracy if possible.

    Returns:
        ``plasticity``, ``depth``, ``step_time``, ``phases``, ``cache``, ``accuracy`` and those of the methods that
        trained: those with data.

    Raises:
        RecordError: if a record cannot be read, or the runs have no metric in common.
    """
    from lightning_egeria.report.drawing import figures_of  # matplotlib takes a second to import

    several = [runs] if isinstance(runs, (RunRecord, str, os.PathLike)) else list(runs)
    paths = [None if isinstance(run, RunRecord) else record_file(run) for run in several]
    records = [run if isinstance(run, RunRecord) else RunRecord.read(run) for run in several]
    return figures_of(with_short_names(records, paths), metric)
