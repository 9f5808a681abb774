"""Compiling a description: resolved, checked, with methods chosen, as immutable run directories."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.core.programs import files as disk
from lightning_egeria.core.programs.descriptions import Description
from lightning_egeria.core.training.methods import check_combination
from lightning_egeria.errors import ArgumentError, CompilationError, DescriptionError, UnsupportedError
from lightning_egeria.jobs.environments import lock_of, requirements_in
from lightning_egeria.jobs.optimisations import Choice, Facts, Measured, choose
from lightning_egeria.jobs.provenance import Provenance, installed_distributions, provenance_of
from lightning_egeria.jobs.redaction import forms_of
from lightning_egeria.jobs.rundirs import CODE, EXPLANATION, JOB, LOCK, digest_of, write_run_directory
from lightning_egeria.jobs.schema import Job

LARGEST_CODE = 100 * 2**20
MOST_PATTERNS = 200
_LARGEST_LOCK = 2**24


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One run directory.

    Attributes:
        name: of the job, with the place in its sweep.
        path: of the run directory.
        job: content of its `job.json`.
        choices: methods, and why.
    """

    name: str
    path: Path
    job: Mapping[str, Any]
    choices: Sequence[Choice]


class Compiler:
    """Compiles descriptions into a folder.

    Args:
        runs: folder of the run directories.
        locks: folder of the locks that were resolved.
        measured: returns the costs of an earlier run by its key; None without.
    """

    def __init__(self, runs: Path, locks: Path, measured: Callable[[str], Measured | None] = lambda key: None) -> None:
        self.runs, self.locks, self.measured = runs, locks, measured

    def compile(self, description: Description[Job]) -> list[Compiled]:
        """Return the run directory of each combination of the sweep; of one without.

        Raises:
            DescriptionError: a name in the description does not exist.
            CompilationError: a file, a lock, a secret or the disk is in the way.
        """
        job = description.content
        provenance = provenance_of(description.folder)
        files = dict(_files(description))
        lock = self._lock(description)
        _check_data(description)
        shared: dict[str, bytes] = {LOCK: lock.encode(), **{f"{CODE}/{name}": data for name, data in files.items()}}
        provided = provenance.content()
        shared["provenance.json"] = _json(provided)
        if provenance.changes:
            shared["changes.patch"] = provenance.changes.encode(errors="surrogateescape")
        combinations = list(_combinations(job))
        compiled = []
        for place, values in enumerate(combinations):
            name = job.name if len(combinations) == 1 else f"{job.name}.{place}"
            compiled.append(self._one(description, name, values, shared, provenance))
        return compiled

    def _one(
        self,
        description: Description[Job],
        name: str,
        values: Mapping[str, str],
        shared: Mapping[str, bytes],
        provenance: Provenance,
    ) -> Compiled:
        content = dataclasses.asdict(description.content)
        del content["sweep"]
        content["name"] = name
        entry = content["entry"]
        if description.content.entry.experiment is None:
            content["environment"]["variables"] |= values
            choices = choose(content["optimisations"], Facts(trains=False))
        else:
            entry["overrides"] += [f"{key}={value}" for key, value in values.items()]
            choices, facts, content["cost_key"] = self._methods(description, entry, provenance)
            content["epochs"] = facts.epochs
        content["methods"] = {choice.method: dict(choice.options) for choice in choices if choice.on}
        content["own_environment"] = _has_own_environment(description.content)
        contents = {
            **shared,
            JOB: _json(content),
            EXPLANATION: explanation(choices).encode(),
        }
        _check_secrets(description, contents)
        return Compiled(name, write_run_directory(self.runs, contents), content, choices)

    def _methods(
        self, description: Description[Job], entry: dict[str, Any], provenance: Provenance
    ) -> tuple[list[Choice], Facts, str]:
        """Check an experiment, choose its methods, and complete its overrides."""
        # Not above: only experiments need Hydra, and the classes they name.
        from lightning_egeria.jobs import experiments

        job = description.content
        variables = {**os.environ, **job.environment.variables, **_data_variables(description)}
        arguments = experiments.arguments_of(job.entry.experiment or "", entry["overrides"])
        try:
            config = experiments.composed(arguments, variables)
            code = f"{provenance.commit} {provenance.content()['changes']} {provenance.versions['lightning_egeria']}"
            key = experiments.cost_key(config, code)
            facts = experiments.facts_of(config, self.measured(key))
            choices = choose(job.optimisations, facts)
            check_combination(CONFIGURABLE[choice.method] for choice in choices if choice.on)
            ranks = job.resources.nodes * (job.resources.most_devices or job.resources.devices)
            if facts.ranks > ranks:
                raise ArgumentError(f"it trains {facts.ranks} ranks, but resources has {ranks} devices")
            methods = experiments.overrides_for(choices, facts.pretrained)
            methods += experiments.checkpoint_overrides(job.checkpoints.every_steps)
            experiments.composed([*arguments, *methods], variables)
        except (ArgumentError, UnsupportedError) as error:
            raise DescriptionError(description.mistake("entry.experiment", str(error))) from error
        entry["overrides"] = [*entry["overrides"], *methods]
        return choices, facts, key

    def _lock(self, description: Description[Job]) -> str:
        environment = description.content.environment
        name = environment.lock or environment.requirements
        if name is None:
            return installed_distributions()
        key = "environment.lock" if environment.lock else "environment.requirements"
        try:
            text = disk.read_text(_inside(description, key, name), _LARGEST_LOCK, errors="replace")
        except OSError as error:
            raise CompilationError(description.mistake(key, f"{name}: cannot read it: {error.strerror}")) from error
        try:
            requirements = requirements_in(text, pinned=environment.lock is not None)
            if environment.lock is not None:
                return "".join(f"{line}\n" for line in requirements)
            return lock_of(requirements, self.locks)
        except CompilationError as error:
            raise CompilationError(description.mistake(key, f"{name}: {error}")) from error


def explanation(choices: Sequence[Choice]) -> str:
    """Return which methods are on and why: a line for those with the same reason."""
    methods: dict[str, list[str]] = {}
    for choice in choices:
        methods.setdefault(f"{'on' if choice.on else 'off'}: {choice.reason}", []).append(choice.method)
    return "".join(f"{', '.join(names)}: {why}\n" for why, names in methods.items())


def _has_own_environment(job: Job) -> bool:
    return job.environment.lock is not None or job.environment.requirements is not None


def _combinations(job: Job) -> Iterator[dict[str, str]]:
    for values in itertools.product(*job.sweep.values()):
        yield dict(zip(job.sweep, values, strict=True))


def _inside(description: Description[Job], key: str, name: str) -> Path:
    """Return a file below the folder of the description."""
    path = description.folder / name
    if not path.resolve().is_relative_to(description.folder.resolve()):
        raise CompilationError(description.mistake(key, f"{name!r} leaves the folder of the description"))
    if not path.is_file():
        raise CompilationError(description.mistake(key, f"{name!r}: there is no such file in {description.folder}"))
    return path


def _files(description: Description[Job]) -> Iterator[tuple[str, bytes]]:
    size, patterns = 0, description.content.entry.files
    if len(patterns) > MOST_PATTERNS:  # each looks at the whole folder
        message = f"has {len(patterns)} patterns, expected at most {MOST_PATTERNS}. Use * and **"
        raise CompilationError(description.mistake("entry.files", message))
    for place, pattern in enumerate(patterns):
        key = f"entry.files.{place}"
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise CompilationError(description.mistake(key, f"{pattern!r} leaves the folder of the description"))
        try:
            found = [path for path in _matching(description.folder, pattern) if path.is_file()]
        except ValueError as error:
            raise CompilationError(description.mistake(key, f"{pattern!r} is no pattern of files: {error}")) from error
        if not found:
            raise CompilationError(description.mistake(key, f"{pattern!r} matches no file in {description.folder}"))
        for path in found:
            name = path.relative_to(description.folder).as_posix()
            inside = _inside(description, key, name)
            try:
                size += inside.stat().st_size
                if size > LARGEST_CODE:
                    message = f"the files are larger than {LARGEST_CODE} bytes. Name large ones as data"
                    raise CompilationError(description.mistake(key, message))
                yield name, disk.read_at_most(inside, LARGEST_CODE)
            except OSError as error:
                raise CompilationError(description.mistake(key, f"{name}: cannot read it: {error.strerror}")) from error


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match a pattern, as `Path.glob`, sorted.

    Patterns go through no link to a folder: several links that lead back, in each part of a pattern, would multiply.

    Raises:
        ValueError: it is no pattern.
    """
    found = {folder}
    for part in PurePosixPath(pattern).parts:
        if part == "**":
            found |= {Path(place, name) for start in found for place, inner, _ in os.walk(start) for name in inner}
            found = {path for path in found if not path.is_symlink() or path == folder}
        elif "**" in part:
            raise ValueError("'**' can only be an entire path component")
        elif any(letter in part for letter in "*?["):
            folders = [path for path in found if path == folder or not path.is_symlink()]
            inside = (Path(entry) for path in folders if path.is_dir() for entry in os.scandir(path))
            found = {path for path in inside if fnmatch.fnmatchcase(path.name, part)}
        else:
            found = {path / part for path in found if os.path.lexists(path / part)}
    return sorted(found)


def _check_data(description: Description[Job]) -> None:
    for name, data in description.content.data.items():
        path = description.folder / data.path
        key = f"data.{name}"
        if not path.exists():
            raise CompilationError(
                description.mistake(f"{key}.path", f"{data.path!r}: there is no such file or folder")
            )
        try:
            digest = digest_of(path) if data.digest is not None else None
        except OSError as error:
            reason = f"{data.path}: cannot read it: {error.strerror or error}"
            raise CompilationError(description.mistake(f"{key}.path", reason)) from error
        if digest != data.digest:
            raise CompilationError(description.mistake(f"{key}.digest", f"{data.path} has the digest {digest}"))


def _data_variables(description: Description[Job]) -> dict[str, str]:
    data = description.content.data
    return {f"EGERIA_DATA_{name.upper()}": str(description.folder / data[name].path) for name in data}


def _check_secrets(description: Description[Job], contents: Mapping[str, bytes]) -> None:
    for name in description.content.environment.secrets:
        value = os.environ.get(name)
        if value is None:
            message = f"{name} is not set here. Set it for this command, and where the job runs"
            raise CompilationError(description.mistake("environment.secrets", message))
        forms = forms_of(value)
        for file, content in contents.items():
            # As it stands in the file, and as a program that reads the JSON sees it.
            written = b"\0".join([content, *_texts_in(json.loads(content))]) if file == JOB else content
            if any(form in written for form in forms):
                message = f"the value of {name} would be written to {file} of the run directory. Take it out"
                raise CompilationError(description.mistake("environment.secrets", message))


def _texts_in(content: Any) -> Iterator[bytes]:
    if isinstance(content, str):
        yield content.encode(errors="surrogateescape")
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from (*_texts_in(name), *_texts_in(value))
    elif isinstance(content, list):
        for value in content:
            yield from _texts_in(value)


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
