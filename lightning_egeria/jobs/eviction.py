"""Removing environments and run directories that no job has used for some time. The files of jobs stay."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

from lightning_egeria.jobs import environments
from lightning_egeria.jobs.history import History
from lightning_egeria.jobs.home import ARRAYS, Home
from lightning_egeria.jobs.rundirs import lock_in, remove


@dataclasses.dataclass(frozen=True)
class Evicted:
    """What was removed.

    Attributes:
        environments: names.
        runs: names of the run directories.
    """

    environments: list[str]
    runs: list[str]


def evict(home: Home, history: History, older_than_s: float) -> Evicted:
    """Remove what no job has used for some time, and return it.

    A run directory stays while a job that has not ended, or ended since, needs it: such a job can resume.

    Args:
        home: of the jobs.
        history: of the home.
        older_than_s: seconds.
    """
    since = time.time() - older_than_s
    removed = []
    with history.transaction():  # no job is submitted meanwhile
        needed = history.runs_since(since)
        for place in sorted(home.runs.iterdir()):
            if str(place) not in needed and place.stat().st_mtime < since:
                remove(place)
                removed.append(place.name)
        if not history.unfinished("slurm"):
            for place in (home.path / ARRAYS).glob("*"):
                if place.stat().st_mtime < since:
                    shutil.rmtree(place)
        keep = {environments.environment_name(lock_in(Path(run))) for run in needed if Path(run).is_dir()}
    return Evicted(environments.evict(home.environments, older_than_s, keep), removed)
