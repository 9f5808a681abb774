"""The folder that holds run directories, jobs, environments and the history."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lightning_egeria.core.programs import files
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.compiler import Compiler
from lightning_egeria.jobs.history import History
from lightning_egeria.jobs.jobfolders import JobFolder
from lightning_egeria.jobs.scheduling import DEFAULT, policy_named

VARIABLE = "EGERIA_JOBS"
ARRAYS = "arrays"  # folder of what the jobs of one array of Slurm share
_LARGEST_NAME = 2**10


class Home:
    """Where jobs live: a folder with mode 0700, and so are the folders in it. What is there is executed.

    It is made if it does not exist.

    Args:
        path: of the folder.

    Raises:
        QueueError: it cannot be written; or others could have written to it, or could put another in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.runs, self.jobs = self.path / "runs", self.path / "jobs"
        self.environments, self.locks = self.path / "environments", self.path / "locks"
        self._policy = self.path / "policy"
        try:
            for part in (self.path, self.runs, self.jobs, self.environments, self.locks):
                files.make_private(part)
            files.check_above(self.path, owners=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied", str(self.path))
        except OSError as error:
            others = "What is there is executed: remove what others could have written. "
            raise QueueError(
                f"{error.filename or self.path}: {error.strerror or error}. "
                f"{others if error.errno == errno.EPERM else ''}Name another folder "
                f"with egeria jobs --home DIR, or with {VARIABLE}"
            ) from error

    @classmethod
    def default(cls) -> Path:
        """Return the folder that the environment names, or one below the user's data.

        Raises:
            QueueError: this user has no home directory, and no variable names a folder.
        """
        named, data = os.environ.get(VARIABLE), os.environ.get("XDG_DATA_HOME")
        if named:
            return Path(named)
        try:
            return (Path(data) if data else Path.home() / ".local" / "share") / "egeria"
        except RuntimeError as error:
            raise QueueError(
                f"this user has no home directory. Name a folder with egeria jobs --home DIR, or with {VARIABLE}"
            ) from error

    def history(self) -> History:
        """Open the history."""
        return History(self.path / "history.sqlite", self.jobs)

    @property
    def policy(self) -> str:
        """Name of the policy that the queue of this home follows.

        Raises:
            QueueError: the file that names it cannot be read.
        """
        try:
            return files.read_text(self._policy, _LARGEST_NAME, links=False).strip()
        except FileNotFoundError:
            return DEFAULT
        except (OSError, ValueError) as error:
            raise QueueError(f"cannot read {self._policy}: {error}. Remove it") from error

    def follow(self, policy: str) -> None:
        """Have the queue of this home follow a policy from its next decision on.

        Raises:
            QueueError: the queue has none of this name.
            OSError: it cannot be written.
        """
        policy_named(policy)
        files.write_whole(self._policy, policy, files.PRIVATE)

    def folder(self, id: int) -> JobFolder:
        """Return the folder of a job."""
        return JobFolder(self.jobs / str(id))

    def compiler(self, history: History) -> Compiler:
        """Return a compiler that knows the costs of earlier runs."""
        return Compiler(self.runs, self.locks, history.cost)
