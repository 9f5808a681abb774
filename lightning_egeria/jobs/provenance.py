"""Where a job comes from: the commit, what is not committed, the versions."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import lightning_egeria
from lightning_egeria.core.programs import files
from lightning_egeria.errors import CompilationError

LARGEST_DIFF = 10 * 2**20
LARGEST_INDEX = 2**28
LONGEST_S = 120.0  # for one call of git: a pipe in the place of a file would hold it up for ever
_SMALL = 2**20  # of HEAD, of the settings and of what git says of them
_PART = 2**20
_MOST_NAMES = 200  # in one call, whose arguments have a limit
# Settings of a repository without which its files cannot be read or compared, with all values that they may have.
_PLAIN = {
    "core.autocrlf": "true|false|input",
    "core.eol": "lf|crlf|native",
    "core.filemode": "true|false",
    "core.ignorecase": "true|false",
    "core.symlinks": "true|false",
    "extensions.objectformat": "sha1|sha256",
    "extensions.refstorage": "files|reftable",
}


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a job comes from.

    Attributes:
        commit: the commit that is checked out; None outside of a repository.
        changes: what is not committed yet of the files git knows, as a patch.
        filtered: files that may have changed, which only a program that the repository names could tell (Git LFS, say);
            they are not part of the patch.
        versions: of Python and of this package.
    """

    commit: str | None
    changes: str
    versions: dict[str, str]
    filtered: tuple[str, ...] = ()

    def content(self) -> dict[str, object]:
        """Return what the run directory keeps of it."""
        changes = self.changes.encode(errors="surrogateescape")
        digest = hashlib.sha256(changes).hexdigest() if changes else None
        content: dict[str, object] = {"commit": self.commit, "changes": digest, "versions": self.versions}
        return content | {"filtered": list(self.filtered)} if self.filtered else content


def provenance_of(folder: Path) -> Provenance:
    """Return where the files of a folder come from. No program that the repository names is run.

    Raises:
        CompilationError: if git fails, or the patch is larger than 10 MiB.
    """
    versions = {"python": platform.python_version(), "lightning_egeria": lightning_egeria.__version__}
    git, top = shutil.which("git"), _top_of(folder.resolve())
    if git is None or top is None:
        return Provenance(None, "", versions)
    with tempfile.TemporaryDirectory(prefix="egeria-git-") as temporary:
        repository = _Repository(git, top, Path(temporary))
        commit = repository.commit()
        if commit is None:
            return Provenance(None, "", versions)
        changed, filtered = repository.changed(folder.resolve())
        return Provenance(commit, repository.patch(changed), versions, filtered)


def installed_distributions() -> str:
    """Return the name and version of each installed distribution, one a line, sorted."""
    found = {(dist.metadata["Name"] or "").lower(): dist.version for dist in importlib.metadata.distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()) if name)


def _top_of(folder: Path) -> Path | None:
    """Return the folder of the working tree that a folder is in. A folder that is a bare repository counts for none."""
    for place in (folder, *folder.parents):
        own = place / ".git"
        if own.is_file() or ((own / "HEAD").is_file() and (own / "objects").is_dir()):
            return place
    return None


class _Repository:
    """The objects of a repository, read by git through a folder of ours.

    A repository names programs in its settings and hooks: filters, a monitor of files, a way to fetch, a pager. Its
    settings may include others, and a submodule or a linked working tree has its own. So git gets none of them: it
    reads a folder that has the index and leads to the objects and names of the repository, and whose settings are ours.
    The settings of the user and of the machine stay away too, since a repository chooses with its attributes which of
    the filters there run.

    Args:
        git: the program.
        top: folder of the working tree.
        ours: an empty folder.
    """

    def __init__(self, git: str, top: Path, ours: Path) -> None:
        self._git, self._top, self._ours = str(Path(git).absolute()), top, ours
        try:
            own = self._folder_of(top / ".git")
            shared = own
            if (own / "commondir").exists():  # a linked working tree
                shared = own / files.read_text(own / "commondir", _SMALL, errors="surrogateescape").strip()
            files.write_whole(ours / "HEAD", files.read_at_most(own / "HEAD", _SMALL))
            for name in ("objects", "refs", "packed-refs", "reftable"):
                if (shared / name).exists():
                    (ours / name).symlink_to(shared / name)
            for index in (own / "index", *own.glob("sharedindex.*")):
                if index.is_file():
                    self._copy_index(index)
            settings = files.read_at_most(shared / "config", _SMALL) if (shared / "config").exists() else b""
        except (OSError, ValueError) as error:
            raise CompilationError(f"{top}: cannot read the repository: {error}") from error
        files.write_whole(ours / "config", _settings({}))
        files.write_whole(ours / "config", _settings(self._plain(settings)))

    def commit(self) -> str | None:
        """Return the commit that is checked out; None before the first one."""
        found = self._run("rev-parse", "--quiet", "--verify", "HEAD", most=_SMALL, check=False)
        return found.decode(errors="replace").strip() or None

    def changed(self, folder: Path) -> tuple[list[bytes], tuple[str, ...]]:
        """Return the files below a folder that differ from the commit, and those of which only a filter could tell."""
        place = os.fsencode(folder.relative_to(self._top))
        names = self._diff("--name-only", "-z", paths=[place], most=LARGEST_INDEX).split(b"\0")[:-1]
        answer = b"".join(name + b"\0" for name in names)
        told = self._run("check-attr", "-z", "--stdin", "filter", most=LARGEST_INDEX, given=answer).split(b"\0")
        plain: list[bytes] = []
        filtered: list[bytes] = []
        for name, value in zip(told[0::3], told[2::3], strict=False):
            (plain if value in (b"unspecified", b"unset") else filtered).append(name)
        return plain, tuple(name.decode(errors="backslashreplace") for name in filtered)

    def patch(self, names: Sequence[bytes]) -> str:
        """Return how files differ from the commit."""
        parts, size = [], 0
        for start in range(0, len(names), _MOST_NAMES):
            parts.append(self._diff("--binary", paths=names[start : start + _MOST_NAMES], most=LARGEST_DIFF - size))
            size += len(parts[-1])
        return b"".join(parts).decode(errors="surrogateescape")

    def _diff(self, *arguments: str, paths: Sequence[bytes], most: int) -> bytes:
        plain = ("--no-ext-diff", "--no-textconv", "--no-renames", "--no-color", "--ignore-submodules=all")
        return self._run("diff", *plain, *arguments, "HEAD", "--", *paths, most=most)

    def _plain(self, settings: bytes) -> dict[str, str]:
        """Return the settings that name no program, of a text that git parses."""
        names = "|".join(name.replace(".", r"\.") for name in _PLAIN)
        told = self._run(
            *("config", "--file", "-", "--no-includes", "-z", "--get-regexp", f"^({names})$"),
            most=_SMALL,
            given=settings,
            check=False,
        )
        pairs = (pair.partition("\n") for pair in told.decode(errors="replace").split("\0"))
        return {name: value for name, _, value in pairs if name in _PLAIN and re.fullmatch(_PLAIN[name], value)}

    def _folder_of(self, place: Path) -> Path:
        """Return the folder of a repository, which a file may name: in a linked working tree, or a submodule."""
        if place.is_dir():
            return place
        named = files.read_text(place, _SMALL, errors="surrogateescape").strip()
        return place.parent / named.removeprefix("gitdir:").strip()

    def _copy_index(self, index: Path) -> None:
        status = index.stat()
        if status.st_size > LARGEST_INDEX:
            raise OSError(errno.EFBIG, f"it is larger than {LARGEST_INDEX} bytes", str(index))
        files.copy(index, self._ours / index.name)
        # Git believes what the index says of a file only if that is older than the index.
        os.utime(self._ours / index.name, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _run(self, *arguments: str | bytes, most: int, given: bytes = b"", check: bool = True) -> bytes:
        """Return what git prints, unless it fails, prints too much or takes too long."""
        names = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
        variables = {name: os.environ[name] for name in names if name in os.environ} | {
            "GIT_DIR": str(self._ours),
            "GIT_WORK_TREE": str(self._top),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            # Versions before 2.32 do not know GIT_CONFIG_GLOBAL.
            "HOME": str(self._ours),
            "XDG_CONFIG_HOME": str(self._ours),
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_PAGER": "cat",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as asked:
            asked.write(given)
            asked.seek(0)
            command = [self._git, "--no-pager", *arguments]
            with subprocess.Popen(
                command, cwd=self._top, env=variables, stdin=asked, stdout=subprocess.PIPE, stderr=told
            ) as process:
                assert process.stdout is not None
                late = threading.Timer(LONGEST_S, process.kill)
                late.start()
                printed = b""
                try:
                    while len(printed) <= most and (part := process.stdout.read(_PART)):
                        printed += part
                    if len(printed) > most:
                        process.kill()
                    status = process.wait()
                finally:
                    late.cancel()
                    late.join()
            told.seek(0)
            said = " ".join(told.read(2000).decode(errors="replace").split())
        if len(printed) > most:
            raise CompilationError(
                f"{self._top}: the uncommitted changes are larger than {LARGEST_DIFF} bytes. Commit them"
            )
        if status < 0 or (status > 0 and check):
            reason = said if status > 0 else f"it was killed, or took longer than {LONGEST_S:.0f} s"
            raise CompilationError(f"{self._top}: git {arguments[0]!s} failed: {reason}")
        return printed if status == 0 else b""


def _settings(values: dict[str, str]) -> str:
    """Return the text of the settings of git."""
    form = 1 if any(name.startswith("extensions.") for name in values) else 0
    lines = [f"[core]\n\trepositoryformatversion = {form}\n"]
    for name, value in values.items():
        section, _, key = name.partition(".")
        lines.append(f"[{section}]\n\t{key} = {value}\n")
    return "".join(lines)
