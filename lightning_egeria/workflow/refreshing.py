"""Bringing the history up to date with what the folders of jobs say."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from lightning_egeria.programs import files
from lightning_egeria.workflow.history import History, Row
from lightning_egeria.workflow.jobfolders import JobFolder, State
from lightning_egeria.workflow.optimisations import Measured
from lightning_egeria.workflow.rundirs import JOB

LARGEST_RECORD = 2**26


def keep_state(history: History, row: Row, folder: JobFolder) -> State:
    """Write the status of a job to the history, and the costs of one that is done; returns its state."""
    status = folder.status()
    history.update(
        row.id,
        state=status.state.value,
        attempt=status.attempt,
        message=status.message,
        started=status.started,
        ended=status.ended,
    )
    if status.state is State.DONE and row.cost_key:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):  # it has recorded nothing
            history.keep_cost(row.cost_key, cost_in(folder.results, Path(row.run)))
    return status.state


def cost_in(results: Path, run: Path) -> Measured:
    """Return the costs that a run of `egeria-train` has recorded in its folder.

    Args:
        results: where it wrote.
        run: its run directory.

    Raises:
        OSError, ValueError, KeyError, TypeError, OverflowError: there are none.
    """
    record, savings = results / "egeria.json", results / "savings.json"
    steps = files.read_json(record, LARGEST_RECORD)["steps"]
    spent = {name: sum(step[name] * step["batches"] for step in steps) for name in _PHASES}
    whole = sum(spent.values())
    kept = files.read_json(savings, LARGEST_RECORD)
    measured = Measured(
        fit_s=float(kept["fit_time_s"]),
        epochs=int(files.read_json(run / JOB, LARGEST_RECORD, links=False)["epochs"]),
        data=spent["data"] / whole if whole else 0.0,
        communication=spent["communication"] / whole if whole else 0.0,
    )
    if not all(map(math.isfinite, (measured.fit_s, measured.data, measured.communication))):
        raise ValueError(f"{record} and {savings} have costs that are no numbers")
    return measured


_PHASES = ("data", "forward", "backward", "communication", "rest")
