"""Run directories: immutable, named by a digest of what is in them, checked before they run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.arguments import PERIOD, SIZE, quantity
from lightning_egeria.errors import CompilationError, ExecutionError
from lightning_egeria.jobs.schema import OPTION, OPTION_NAME, Job

JOB, MANIFEST, EXPLANATION, CODE, LOCK = "job.json", "manifest.json", "explanation.txt", "code", "requirements.lock"
# Why a method is on may name times of earlier runs. What runs is the same.
_NOT_PART = (MANIFEST, EXPLANATION)
_LARGEST = 2**27  # of a file of a run directory


def digest_of(path: Path) -> str:
    """Return the digest of a file, or of a folder: of the names and contents of all files in it.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_dir():
        whole = hashlib.sha256()
        for file in sorted(path.rglob("*"), key=lambda file: file.relative_to(path).parts):
            if file.is_file():
                name = file.relative_to(path).as_posix().encode(errors="surrogateescape")
                whole.update(len(name).to_bytes(8, "big") + name + bytes.fromhex(_of_file(file)))
        return f"sha256:{whole.hexdigest()}"
    return f"sha256:{_of_file(path)}"


def write_run_directory(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write a run directory below ``folder``, or find it there, and return its path.

    Args:
        folder: of all run directories.
        contents: bytes of each file by its relative path.

    Raises:
        CompilationError: a path leaves the directory, or it cannot be written.
    """
    for name in contents:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\\" in name or "\n" in name:
            raise CompilationError(f"{name!r}: leaves the run directory. Use names below the folder of the description")
    digests = {name: hashlib.sha256(contents[name]).hexdigest() for name in sorted(contents) if name not in _NOT_PART}
    manifest = (json.dumps(digests, indent=2) + "\n").encode()
    place = folder / hashlib.sha256(manifest).hexdigest()[:16]
    if (place / MANIFEST).is_file():
        os.utime(place)  # `evict` must not remove it now
        return place
    # Beside its place first, so that no reader finds a part of it.
    beside = folder / f".{place.name}.{os.getpid()}"
    try:
        beside.mkdir(parents=True, mode=0o700)
        for name, content in {**contents, MANIFEST: manifest}.items():
            path = beside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_once(path, content)
            path.chmod(0o444)
        for parent in sorted({path.parent for path in beside.rglob("*")} - {beside}, reverse=True):
            parent.chmod(0o555)
        beside.rename(place)
        place.chmod(0o555)
    except OSError as error:
        remove(beside)
        if (place / MANIFEST).is_file():  # another process was faster
            return place
        raise CompilationError(f"cannot write the run directory {place}: {error.strerror or error}") from error
    return place


def read_run_directory(place: Path) -> dict[str, Any]:
    """Return the job of a run directory, after a check that nothing in it has changed.

    Raises:
        ExecutionError: it is missing, not this user's alone, holds a file that the manifest does not name, or a file is
            not what the manifest says.
    """
    try:
        check_owned(place)
        manifest = files.read_at_most(place / MANIFEST, _LARGEST, links=False)
        if hashlib.sha256(manifest).hexdigest()[:16] != place.name:
            raise ExecutionError(f"{place}: the manifest has changed. Compile the job again")
        digests = files.parsed_json(manifest)
        names = {
            path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_symlink() or not path.is_dir()
        }
        if added := sorted(names - {*digests, *_NOT_PART}):
            raise ExecutionError(f"{place}: {added[0]!r} was added since it was compiled. Compile the job again")
        for name, digest in digests.items():
            if name not in names or _of_file(place / name, links=False) != digest:
                raise ExecutionError(f"{place}: {name} has changed since it was compiled. Compile the job again")
        content = files.read_json(place / JOB, _LARGEST, links=False)
    except OSError as error:
        raise ExecutionError(f"{place}: cannot read the run directory: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ExecutionError(f"{place}: this is no run directory: {error}. Compile the job again") from error
    job = _checked(place, content)
    return {**content, **job}


def _checked(place: Path, content: Any) -> dict[str, Any]:
    """Return the keys of a description that a job has, with values that the rest of the program can use.

    Raises:
        ExecutionError: they are none. The digests are right then, but another program has written them.
    """
    try:
        job = dataclasses.asdict(msgspec.convert({**content}, Job))
        json.dumps(job).encode()
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ExecutionError(f"{place}: {JOB} describes no job: {error}. Compile the job again") from error
    del job["sweep"]
    resources, entry = job["resources"], job["entry"]
    fits = all(
        text is None or re.fullmatch(pattern, text)
        for text, pattern in (
            (resources["memory"], SIZE),
            (resources["time"], PERIOD),
            (job["checkpoints"]["grace"], PERIOD),
            (job["name"], r"[A-Za-z0-9._-]+"),
            *((job["slurm"][name], OPTION) for name in ("partition", "account", "qos", "constraint")),
            *((name, OPTION_NAME) for name in job["slurm"]["extra"]),
            *((value, OPTION) for value in job["slurm"]["extra"].values()),
        )
    )
    command = entry["command"]
    as_list = isinstance(command, list) and bool(command) and all(isinstance(part, str) for part in command)
    if not isinstance(content.get("methods", {}), dict):
        fits = False
    if not fits or not (isinstance(command, str) or as_list or (command is None and entry["experiment"])):
        raise ExecutionError(f"{place}: {JOB} describes no job. Compile the job again")
    return job


def listed(place: Path) -> list[str]:
    """Return the names of the files that the manifest of a run directory has.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return list(files.read_json(place / MANIFEST, _LARGEST, links=False))


def time_limit_in(place: Path) -> int | None:
    """Return the longest seconds of an attempt that a run directory names; None without, or if it cannot be read."""
    try:
        limit = files.read_json(place / JOB, _LARGEST, links=False)["resources"]["time"]
        return quantity(limit) if re.fullmatch(PERIOD, limit) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def lock_in(place: Path) -> str:
    """Return the lock of a run directory.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return files.read_text(place / LOCK, _LARGEST, links=False)


def explanation_in(place: Path) -> str:
    """Return why the methods of a run directory are on or off, one a line.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return files.read_text(place / EXPLANATION, _LARGEST, links=False)


def check_owned(place: Path) -> None:
    """Check that no other user could have written to a folder whose content is executed.

    Raises:
        ExecutionError: it belongs to another user, or others may write to it.
        OSError: it is no folder, or a link to one.
    """
    try:
        files.check_private(place, links=False)
    except PermissionError as error:
        raise ExecutionError(
            f"{place}: others could have written here, and what is here is executed: {error.strerror}. Use a folder "
            "that is yours alone, and remove what they could have written"
        ) from error


def remove(place: Path) -> None:
    """Remove a directory whose files and folders are read-only."""
    for path in [place, *place.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(place, ignore_errors=True)


def _of_file(path: Path, links: bool = True) -> str:
    with files.reading(path, links) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
