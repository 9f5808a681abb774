"""What the history keeps of a job that has ended."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from lightning_egeria.core.programs import files
from lightning_egeria.jobs.history import History
from lightning_egeria.jobs.jobfolders import JobFolder, State
from lightning_egeria.jobs.optimisations import Measured
from lightning_egeria.jobs.rundirs import JOB

LARGEST_RECORD = 2**26


def note_end(history: History, id: int) -> None:
    """Note that a job has ended, with its costs if it is done. Its state stays in its folder."""
    row = history.get(id)
    history.update(id, closed=row.status.ended or time.time(), node="", given=0)
    if row.state is State.DONE and row.cost_key:
        results = JobFolder(history.jobs / str(id)).results
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):  # it has recorded nothing
            history.keep_cost(row.cost_key, cost_in(results, Path(row.run)))


def cost_in(results: Path, run: Path) -> Measured:
    """Return the costs that a run of `egeria-train` has recorded in its folder.

    Args:
        results: where it wrote.
        run: its run directory.

    Raises:
        OSError, ValueError, KeyError, TypeError, OverflowError: there are none.
    """
    path = results / "savings.json"
    measured = Measured(
        fit_s=float(files.read_json(path, LARGEST_RECORD)["fit_time_s"]),
        epochs=int(files.read_json(run / JOB, LARGEST_RECORD, links=False)["epochs"]),
    )
    if not math.isfinite(measured.fit_s):
        raise ValueError(f"{path} has a time that is no number")
    return measured
