"""The jobs of a live cluster, described in a YAML file."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from lightning_egeria.errors import JobError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True)
class JobDescription:
    """A job: a command that goes on where it stopped when it is started again.

    Attributes:
        name: unique in the file; the name of its folder.
        command: program and arguments. ``{devices}`` becomes the number of its devices, ``{folder}`` its folder.
        arrives_s: seconds after the start of the run.
        devices: devices it asks for, for policies that give all of them or none.
        most_devices: devices it can use at all.
        environment: variables that are added to those of the run.
    """

    name: str
    command: tuple[str, ...]
    arrives_s: float = 0.0
    devices: int = 1
    most_devices: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def arguments(self, devices: int, folder: Path) -> list[str]:
        """Return program and arguments for a number of devices."""
        return [word.replace("{devices}", str(devices)).replace("{folder}", str(folder)) for word in self.command]


_KEYS = [field.name for field in dataclasses.fields(JobDescription) if field.name != "name"]


def read_jobs(path: Path) -> list[JobDescription]:
    """Read jobs from a YAML file: a mapping ``jobs`` from names to `JobDescription`.

    Raises:
        JobError: the file cannot be read, or describes no job; the message names the job and the key.
    """
    try:
        described = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise JobError(f"{path} cannot be read as YAML: {error}") from error
    jobs = described.get("jobs") if isinstance(described, dict) else None
    if not isinstance(jobs, dict) or not jobs or len(described) > 1:
        raise JobError(f"{path} needs one key, 'jobs', with a mapping from names to jobs")
    return [_job(name, values) for name, values in jobs.items()]


def _job(name: Any, values: Any) -> JobDescription:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise JobError(f"a job's name is letters, digits, '.', '_' and '-', got {name!r:.80}")
    if not isinstance(values, dict) or "command" not in values:
        raise JobError(f"job {name!r} needs a mapping with a command, got {values!r:.80}")
    for key in values:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            raise JobError(f"job {name!r} has no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    command = values["command"]
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise JobError(f"job {name!r}: command must be a list of strings, program first, got {command!r:.80}")
    devices = _count(name, "devices", values.get("devices", 1))
    most = _count(name, "most_devices", values.get("most_devices", devices))
    if most < devices:
        raise JobError(f"job {name!r}: most_devices must be at least devices={devices}, got {most}")
    arrives = values.get("arrives_s", 0)
    if type(arrives) not in (int, float) or not 0 <= arrives < 10**9:
        raise JobError(f"job {name!r}: arrives_s must be a number of at least 0, got {arrives!r:.80}")
    environment = values.get("environment", {})
    pairs = environment.items() if isinstance(environment, dict) else [(None, None)]
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in pairs):
        raise JobError(f"job {name!r}: environment must be a mapping of strings, got {environment!r:.80}")
    return JobDescription(name, tuple(command), float(arrives), devices, most, environment)


def _count(name: str, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise JobError(f"job {name!r}: {key} must be an integer of at least 1, got {value!r:.80}")
    return value
