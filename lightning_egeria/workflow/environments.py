"""Python environments of jobs: a lock for each set of requirements, one environment for each lock, kept and evicted."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from lightning_egeria.errors import CompilationError, ExecutionError
from lightning_egeria.programs.files import write_whole

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._ -]+\])?\s*([<>=!~][^;@]*)?(;.*)?")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?\s*==\s*[^\s*;,]+\s*(;.*)?")
_READY = "ready"


def requirements_in(text: str, pinned: bool) -> list[str]:
    r"""Return the requirements of a file, without comments, sorted.

    Args:
        text: the file.
        pinned: whether each needs an exact version.

    Raises:
        CompilationError: for a line that is no plain requirement. Options of pip, addresses and files could carry
            secrets, or code that nobody pinned.

    >>> requirements_in("torch>=2  # fast\n\nnumpy", pinned=False)
    ['numpy', 'torch>=2']
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        if not (_PINNED if pinned else _REQUIREMENT).fullmatch(line):
            wanted = "name==version" if pinned else "a name and maybe versions"
            raise CompilationError(
                f"line {number}: expected {wanted}, got {line!r}. Options and addresses belong into pip's own settings"
            )
        found.append(line)
    return sorted(found, key=str.lower)


def lock_of(requirements: list[str], folder: Path) -> str:
    """Return exact versions of all that the requirements need, as the package index has them now.

    The same requirements have the same lock until the file in ``folder`` is removed.

    Raises:
        CompilationError: they cannot be resolved; the message has the end of what the resolver said.
    """
    text = "\n".join(requirements) + "\n"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    kept = folder / f"{hashlib.sha256(f'{python} {sys.platform} {text}'.encode()).hexdigest()[:16]}.txt"
    if kept.is_file():
        return kept.read_text()
    if not requirements:
        return ""
    if shutil.which("uv"):
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python, "-"]
        lock = _resolved(command, text)
    else:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
        ]
        report = json.loads(_resolved([*command, *requirements], ""))
        names = sorted(
            f"{part['metadata']['name'].lower()}=={part['metadata']['version']}" for part in report["install"]
        )
        lock = "".join(f"{name}\n" for name in names)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(kept, lock)
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
        ExecutionError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / environment_name(lock)
    python = place / "bin" / "python"
    with (folder / f"{place.name}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (place / _READY).is_file():
            shutil.rmtree(place, ignore_errors=True)
            tell(f"making the environment {place.name} of {len(lock.splitlines())} packages")
            started = time.monotonic()
            for command in _making(place, python, lock):
                _run(command, tell)
            (place / _READY).write_text(lock)
            tell(f"the environment {place.name} is ready after {time.monotonic() - started:.0f} s")
        os.utime(place / _READY)
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
        with (folder / f"{place.name}.lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
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
        installing = ["uv", "pip", "install", "--python", str(python), "--no-deps", *packages]
    else:
        making = [[sys.executable, "-m", "venv", str(place)]]
        installing = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", *packages]
    return making + ([installing] if packages else [])


def _run(command: list[str], tell: Callable[[str], None]) -> None:
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
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
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompilationError(f"environment: cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        raise CompilationError(f"environment: the requirements cannot be resolved: {done.stderr.strip()[-800:]}")
    return done.stdout
