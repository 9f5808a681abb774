"""The folder that holds run directories, jobs, environments and the history."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_egeria.errors import ExecutionError, QueueError
from lightning_egeria.workflow.compiler import Compiler
from lightning_egeria.workflow.history import History
from lightning_egeria.workflow.jobfolders import JobFolder
from lightning_egeria.workflow.rundirs import check_owned

VARIABLE = "EGERIA_JOBS"


class Home:
    """Where jobs live. It is made if it does not exist, for this user alone.

    Args:
        path: of the folder.

    Raises:
        QueueError: it cannot be written, or others may write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.runs, self.jobs = self.path / "runs", self.path / "jobs"
        self.environments, self.locks = self.path / "environments", self.path / "locks"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owned(self.path)
            for part in (self.runs, self.jobs):
                part.mkdir(mode=0o700, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except (OSError, ExecutionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise QueueError(f"{self.path}: {reason}. Name another folder with --home or {VARIABLE}") from error

    @classmethod
    def default(cls) -> Path:
        """Return the folder that the environment names, or one below the user's data."""
        named = os.environ.get(VARIABLE)
        if named:
            return Path(named)
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "egeria-jobs"

    def history(self) -> History:
        """Open the history."""
        return History(self.path / "history.sqlite")

    def folder(self, id: int) -> JobFolder:
        """Return the folder of a job."""
        return JobFolder(self.jobs / str(id))

    def compiler(self, history: History) -> Compiler:
        """Return a compiler that knows the costs of earlier runs."""
        return Compiler(self.runs, self.locks, history.cost)
