"""Python environments of jobs: a lock for each set of requirements, one environment for each lock, kept and evicted."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from lightning_egeria.core.programs import files
from lightning_egeria.errors import CompilationError, ExecutionError

# A name and versions as PEP 508 has them. Installers take any other text, and some file names, for a file to install.
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[A-Za-z0-9,._ -]*\])?\s*"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9.!+_-]*"
_MARKER = r"(;[A-Za-z0-9_.<>=!~'\"() ,+*-]*)?"
_ONE = rf"(===|==|!=|~=|<=|>=|<|>)\s*{_VERSION}(\.\*)?\s*"
_REQUIREMENT = re.compile(rf"{_NAME}(\(?\s*{_ONE}(,\s*{_ONE})*\)?)?\s*{_MARKER}", re.ASCII)
_PINNED = re.compile(rf"{_NAME}==\s*{_VERSION}\s*{_MARKER}", re.ASCII)
_ARCHIVE = re.compile(r"\.(whl|zip|egg|tar|tgz|tbz2?|txz|tlz|gz|bz2|xz|lzma?|zst|toml|txt)$", re.IGNORECASE)
_READY = "ready"
_LARGEST_LOCK = 2**24
# The folder that a command runs in is not a place to import from, nor to find files in.
_PYTHON = [sys.executable, "-P"]


def requirements_in(text: str, pinned: bool) -> list[str]:
    r"""Return the requirements of a file, without comments, sorted.

    Args:
        text: the file.
        pinned: whether each needs an exact version.

    Raises:
        CompilationError: for a line that is no plain requirement. Options of pip, addresses and files could carry
            secrets, or code without a fixed version.

    >>> requirements_in("torch\t>=2  # fast\n\nnumpy", pinned=False)
    ['numpy', 'torch >=2']
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = " ".join(re.sub(r"(^|\s)#.*", "", line).split())  # a tab becomes a space
        if not line:
            continue
        name, versions = re.match(r"([^\s;\[(<>=!~]*)([^;]*)", line).groups()  # type: ignore[union-attr]  # always
        is_file = _ARCHIVE.search(name) or _ARCHIVE.search(versions.rstrip())
        if is_file or not (_PINNED if pinned else _REQUIREMENT).fullmatch(line):
            wanted = "name==version" if pinned else "a name and maybe versions"
            raise CompilationError(
                f"line {number}: expected {wanted}, got {line!r}. Options and addresses belong into pip's own settings"
            )
        found.append(line)
    return sorted(found, key=str.lower)


def lock_of(requirements: list[str], folder: Path) -> str:
    """Return exact versions of all that the requirements need, as the package index has them now.

    Only packages that are built are looked at: others would run their ``setup.py`` here. The same requirements have the
    same lock until the file in ``folder`` is removed.

    Raises:
        CompilationError: they cannot be resolved; the message has the end of what the resolver said.
    """
    text = "\n".join(requirements) + "\n"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    kept = folder / f"{hashlib.sha256(f'{python} {sys.platform} {text}'.encode()).hexdigest()[:16]}.txt"
    try:
        files.make_private(folder)
        if kept.exists():
            return files.read_text(kept, _LARGEST_LOCK, links=False)
    except (OSError, ValueError) as error:
        raise CompilationError(f"environment: cannot use the lock {kept}: {error}") from error
    if not requirements:
        return ""
    if shutil.which("uv"):
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
        lock = _resolved([*command, "--python-version", python, "-"], text)
    else:
        command = [*_PYTHON, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", "-"]
        report = files.parsed_json(_resolved([*command, *requirements], ""))
        names = sorted(
            f"{part['metadata']['name'].lower()}=={part['metadata']['version']}" for part in report["install"]
        )
        lock = "".join(f"{name}\n" for name in names)
    files.write_whole(kept, lock, files.PRIVATE)
    return lock


def environment_name(lock: str) -> str:
    """Return the name of the environment of a lock: a digest of it, of the Python and of the platform."""
    python = f"{sys.version_info.major}.{sys.version_info.minor} {sys.platform}"
    return hashlib.sha256(f"{python}\n{lock}".encode()).hexdigest()[:16]


def python_of(lock: str, folder: Path, tell: Callable[[str], None]) -> Path:
    """Return the Python of the environment of a lock. It is made once and kept; other jobs wait meanwhile.

    Args:
        lock: exact requirements.
        folder: of all environments.
        tell: is given each line that the installer prints.

    Raises:
        ExecutionError: it cannot be made, or another user could have made it.
    """
    place = folder / environment_name(lock)
    python, ready = place / "bin" / "python", place / _READY
    try:
        files.make_private(folder)
        with files.held(folder / f"{place.name}.lock", wait=True):
            if not ready.exists():
                shutil.rmtree(place, ignore_errors=True)
                files.make_private(place)
                tell(f"making the environment {place.name} of {len(lock.splitlines())} packages")
                started = time.monotonic()
                for command in _making(place, python, lock):
                    _run(command, tell)
                files.write_whole(ready, lock, files.PRIVATE)
                tell(f"the environment {place.name} is ready after {time.monotonic() - started:.0f} s")
            files.check_private(place, links=False)
            owners = {part.lstat().st_uid for part in (python.parent, python)}
            if owners != {os.geteuid()} or files.read_text(ready, _LARGEST_LOCK, links=False) != lock:
                raise ExecutionError(f"environment: {place} is not what was made of this lock. Remove that folder")
            files.touch(ready)
    except OSError as error:
        raise ExecutionError(
            f"environment: cannot use {error.filename or place}: {error.strerror or error}. Remove it, so that it is "
            "made again"
        ) from error
    return python


def evict(folder: Path, older_than_s: float, keep: Collection[str] = ()) -> list[str]:
    """Remove environments that no job has started with for some time, and return their names.

    Args:
        folder: of all environments.
        older_than_s: seconds.
        keep: names of environments that jobs need.
    """
    removed = []
    for place in sorted(folder.glob("*/")):
        if place.name in keep:
            continue
        with files.held(folder / f"{place.name}.lock", wait=True):
            ready = place / _READY
            used = (ready if ready.is_file() else place).stat().st_mtime
            if time.time() - used > older_than_s:
                shutil.rmtree(place, ignore_errors=True)
                removed.append(place.name)
    return removed


def _making(place: Path, python: Path, lock: str) -> list[list[str]]:
    packages = [line for line in lock.splitlines() if line]
    if shutil.which("uv"):
        making = [["uv", "venv", "--quiet", "--python", sys.executable, str(place)]]
        installing = ["uv", "pip", "install", "--python", str(python)]
    else:
        making = [[*_PYTHON, "-m", "venv", str(place)]]
        installing = [str(python), "-P", "-m", "pip", "install", "--disable-pip-version-check"]
    installing += ["--no-deps", "--only-binary", ":all:", *packages]
    return making + ([installing] if packages else [])


def _run(command: list[str], tell: Callable[[str], None]) -> None:
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=os.sep
        )
    except OSError as error:
        raise ExecutionError(f"environment: cannot run {command[0]}: {error.strerror or error}") from error
    with process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            tell(line.rstrip())
    if process.returncode != 0:
        raise ExecutionError(f"environment: {' '.join(command[:4])} ... ended with status {process.returncode}: {last}")


def _resolved(command: list[str], text: str) -> str:
    try:
        # In an empty folder: the names of files beside a description may look like requirements.
        with tempfile.TemporaryDirectory(prefix="egeria-lock-") as empty:
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=empty)
    except OSError as error:
        raise CompilationError(f"environment: cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        raise CompilationError(f"environment: the requirements cannot be resolved: {done.stderr.strip()[-800:]}")
    return done.stdout
