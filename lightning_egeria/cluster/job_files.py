"""The jobs of a live cluster, described in a YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_egeria.programs.descriptions import key, read

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


@dataclasses.dataclass(frozen=True)
class _Described:
    command: list[str] = dataclasses.field(metadata=key("a list: program and arguments", pattern=r"[^\x00]*"))
    devices: int = dataclasses.field(
        default=1, metadata=key("devices that it asks for, for policies that give all of them or none", least=1)
    )
    most_devices: int | None = dataclasses.field(
        default=None, metadata=key("devices that it can use at all; devices if left out", least=1)
    )
    arrives_s: float = dataclasses.field(default=0.0, metadata=key("seconds after the start of the run", least=0))
    environment: dict[str, str] = dataclasses.field(
        default_factory=dict,
        metadata=key("variables, beside those of the run", keys=r"[A-Za-z_][A-Za-z0-9_]*", pattern=r"[^\x00]*"),
    )


@dataclasses.dataclass(frozen=True)
class _File:
    jobs: dict[str, _Described] = dataclasses.field(metadata=key("a map from names to jobs", keys=_NAME))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobDescription(_Described):
    """A job: a command that goes on where it stopped when it is started again.

    Attributes:
        name: unique in the file; the name of its folder.
        command: program and arguments. ``{devices}`` becomes the number of its devices, ``{folder}`` its folder.
        devices: devices it asks for, for policies that give all of them or none.
        most_devices: devices it can use at all; None for ``devices``.
        arrives_s: seconds after the start of the run.
        environment: variables that are added to those of the run.
    """

    name: str

    @property
    def most(self) -> int:
        """Devices it can use at all."""
        return self.devices if self.most_devices is None else self.most_devices

    def arguments(self, devices: int, folder: Path) -> list[str]:
        """Return program and arguments for a number of devices."""
        return [word.replace("{devices}", str(devices)).replace("{folder}", str(folder)) for word in self.command]


def read_jobs(path: Path) -> list[JobDescription]:
    """Read jobs from a YAML file: a map ``jobs`` from names to what `JobDescription` has.

    Raises:
        DescriptionError: with all mistakes, each with its line.
    """
    jobs = read(path, _File, _broken_rules).content.jobs
    return [JobDescription(name=name, **vars(job)) for name, job in jobs.items()]


def _broken_rules(file: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not file["jobs"]:
        yield "jobs", "expected at least one job"
    for name, job in file["jobs"].items():
        devices, most = job.get("devices", 1), job.get("most_devices")
        if not job["command"] or not job["command"][0]:
            yield f"jobs.{name}.command", "expected a program"
        if most is not None and most < devices:
            yield f"jobs.{name}.most_devices", f"must be at least devices={devices}, got {most}"
