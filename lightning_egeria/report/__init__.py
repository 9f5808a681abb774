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
    """Return the figures of one or more runs, by name; needs the extra ``lightning-egeria[report]``.

    Args:
        runs: records of `RunRecorder` (its ``record``), or the directories that it wrote to. The other runs are
            compared with the first one.
        metric: logged metric to compare runs by; None takes a metric that all runs have, an accuracy if possible.

    Returns:
        ``plasticity``, ``depth``, ``step_time``, ``phases``, ``cache``, ``accuracy``, and the figures of other methods
        that trained. Figures without data are left out.

    Raises:
        RecordError: if a record cannot be read, or the runs have no metric in common.
    """
    from lightning_egeria.report.drawing import figures_of  # matplotlib takes a second to import

    several = [runs] if isinstance(runs, (RunRecord, str, os.PathLike)) else list(runs)
    paths = [None if isinstance(run, RunRecord) else record_file(run) for run in several]
    records = [run if isinstance(run, RunRecord) else RunRecord.read(run) for run in several]
    return figures_of(with_short_names(records, paths), metric)
