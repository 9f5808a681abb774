"""Where a job comes from: the commit, what is not committed, the versions."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import lightning_egeria
from lightning_egeria.errors import CompilationError

LARGEST_DIFF = 10 * 2**20


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a job comes from.

    Attributes:
        commit: the commit that is checked out; None outside of a repository.
        changes: what is not committed yet of the files git knows, as a patch.
        versions: of Python and of this package.
    """

    commit: str | None
    changes: str
    versions: dict[str, str]

    def content(self) -> dict[str, object]:
        """Return what the run directory keeps of it."""
        digest = hashlib.sha256(self.changes.encode()).hexdigest() if self.changes else None
        return {"commit": self.commit, "changes": digest, "versions": self.versions}


def provenance_of(folder: Path) -> Provenance:
    """Return where the files of a folder come from.

    Raises:
        CompilationError: if git fails, or the patch is larger than 10 MiB.
    """
    versions = {"python": platform.python_version(), "lightning_egeria": lightning_egeria.__version__}
    commit = _git(folder, "rev-parse", "--verify", "HEAD", check=False)
    if commit is None:
        return Provenance(None, "", versions)
    # A repository may name programs in its settings that git would run; these commands run none of them.
    changes = _git(folder, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD", "--", ".") or ""
    if len(changes) > LARGEST_DIFF:
        raise CompilationError(f"{folder}: the uncommitted changes are larger than {LARGEST_DIFF} bytes. Commit them")
    return Provenance(commit.strip(), changes, versions)


def installed_distributions() -> str:
    """Return the name and version of each installed distribution, one a line, sorted."""
    found = {(dist.metadata["Name"] or "").lower(): dist.version for dist in importlib.metadata.distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()) if name)


def _git(folder: Path, *arguments: str, check: bool = True) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None  # without git there is no repository that anybody could name
    if done.returncode != 0:
        if check:
            raise CompilationError(f"{folder}: git {arguments[0]} failed: {' '.join(done.stderr.split())}")
        return None
    return done.stdout
