"""Reading the description of a job, with the rules that its types do not tell."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.core.programs.descriptions import Description, read
from lightning_egeria.core.training.methods import check_combination
from lightning_egeria.errors import UnsupportedError, near_match
from lightning_egeria.jobs.schema import VARIABLE, Job

MOST_JOBS = 1000  # of one sweep
# The words of a description, and those of the table of combinations.
_KEYS = {
    **{name: f"slurm.{name}" for name in ("partition", "account", "qos", "constraint")},
    "job-name": "name",
    "nodes": "resources.nodes",
    "mem": "resources.memory",
    "time": "resources.time",
    **dict.fromkeys(("gpus", "gres", "gpus-per-node"), "resources.devices"),
    "cpus-per-task": "resources.cpus_per_device",
    "signal": "checkpoints.grace",
    "dependency": "queue.after",
}
_OURS = (
    *("array", "chdir", "error", "input", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue"),
    *("uid", "gid", "wrap"),
)
# Why an option of sbatch cannot stand among the further ones.
_ELSEWHERE = {
    **{name: f"use {key} instead" for name, key in _KEYS.items()},
    **dict.fromkeys(_OURS, "is set by the job engine. Leave it out"),
}


def read_description(path: Path, overrides: Sequence[str] = ()) -> Description[Job]:
    """Read the description of a job.

    Args:
        path: YAML file.
        overrides: keys to set, as in ``resources.devices=2``.

    Raises:
        DescriptionError: with all mistakes, each with its line.
    """
    return read(path, Job, broken_rules, overrides)


def broken_rules(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each broken rule of a description: the key and the message.

    Args:
        job: plain values, of the types of the schema.
    """
    entry = job["entry"]
    yield from _of_entry(entry)
    environment = job.get("environment") or {}
    if environment.get("requirements") and environment.get("lock"):
        yield "environment.requirements", "a lock has the requirements already. Keep one of the two"
    doubled = set(environment.get("secrets", ())) & set(environment.get("variables", ()))
    for name in sorted(doubled):
        yield f"environment.variables.{name}", "is a secret too, whose value must not be written here. Remove it here"
    if entry.get("experiment") and (job.get("resources") or {}).get("nodes", 1) > 1:
        yield "resources.nodes", "an experiment runs on one node. For more, use a command with srun or torchrun"
    resources = job.get("resources") or {}
    most, devices = resources.get("most_devices"), resources.get("devices", 1)
    if most is not None and most < devices:
        yield "resources.most_devices", f"expected at least devices={devices}, got {most}"
    wanted = job.get("optimisations", "auto")
    if most is not None and entry.get("experiment") and not (isinstance(wanted, Mapping) and wanted.get("goodput")):
        against = "an experiment runs on a changed number of devices with adaptive batch sizes only"
        yield "resources.most_devices", f"{against}. Write optimisations: {{goodput: true}}"
    if most is not None and resources.get("nodes", 1) > 1:
        yield "resources.most_devices", "the number of devices changes on one node only. Use nodes=1"
    for name in (job.get("slurm") or {}).get("extra", {}):
        if name in _ELSEWHERE:
            yield f"slurm.extra.{name}", _ELSEWHERE[name]
    yield from _of_optimisations(job.get("optimisations", "auto"), trains=bool(entry.get("experiment")))
    yield from _of_sweep(job)
    for name, data in job.get("data", {}).items():
        if data.get("stage") and not data.get("digest"):
            yield (
                f"data.{name}.stage",
                "a copy is checked by its digest, which is missing. `egeria jobs digest` prints it",
            )


def _of_entry(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    command, experiment = entry.get("command"), entry.get("experiment")
    if (command is None) == (experiment is None):
        yield "entry", "expected either experiment or command"
    if command is not None:
        as_list = isinstance(command, list) and command and all(isinstance(part, str) for part in command)
        if not as_list and not (isinstance(command, str) and command.strip()):
            yield "entry.command", f"expected a list of texts, or one text for sh, got {command!r}"
        elif "\0" in "".join(command):
            yield "entry.command", "has a zero byte"
        if entry.get("overrides"):
            yield "entry.overrides", "belongs to an experiment. Write arguments into the command"
    for place, override in enumerate(entry.get("overrides", ())):
        yield from _of_override(f"entry.overrides.{place}", override)


def _of_override(key: str, override: str) -> Iterator[tuple[str, str]]:
    if override.lstrip("+~").startswith(("callbacks=", "cache=", "run_dir=", "ckpt_path=", "hydra.")):
        name = override.lstrip("+~").partition("=")[0]
        better = "optimisations" if name in ("callbacks", "cache") else "checkpoints, or a new job,"
        yield key, f"{name} is set by the job engine. Use {better} instead"


def _of_sweep(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A name in a sweep keeps the rules of what it becomes: an override of an experiment, a variable of a command."""
    environment, sweep = job.get("environment") or {}, job.get("sweep", {})
    if (jobs := math.prod(map(len, sweep.values()))) > MOST_JOBS:
        yield "sweep", f"has {jobs} combinations, expected at most {MOST_JOBS}. Leave out values"
    for name, values in sweep.items():
        key = f"sweep.{name}"
        if not values:
            yield key, "expected at least one value"
        for value, count in Counter(values).items():
            if count > 1:
                yield key, f"has {value!r} {count} times. Keep one"
        if job["entry"].get("experiment"):
            yield from _of_override(key, f"{name}=")
            continue
        if not re.fullmatch(VARIABLE, name):
            better = (
                re.sub(r"\W", "_", name, flags=re.ASCII).upper().removeprefix("EGERIA_").lstrip("0123456789") or "X"
            )
            yield key, f"becomes an environment variable of the command. Write {better}, and read ${better} there"
        for other in ("variables", "secrets"):
            if name in environment.get(other, ()):
                yield key, f"stands in environment.{other} too. Keep one of the two"


def _of_optimisations(chosen: Any, trains: bool) -> Iterator[tuple[str, str]]:
    if chosen in ("auto", "none"):
        return
    if not isinstance(chosen, Mapping):
        near = near_match(str(chosen), [*CONFIGURABLE, "auto", "none"])
        if chosen in CONFIGURABLE:
            near = f" Write {{{chosen}: true}}"
        yield "optimisations", f"expected auto, none, or a map of methods, got {chosen!r}.{near}"
        return
    for name, options in chosen.items():
        if name not in CONFIGURABLE:
            near = near_match(name, CONFIGURABLE) or f" Methods: {', '.join(CONFIGURABLE)}"
            yield f"optimisations.{name}", f"no such method.{near}"
        elif not isinstance(options, bool | Mapping):
            yield f"optimisations.{name}", f"expected true, false or options, got {options!r}"
        elif options is not False and not trains:
            yield f"optimisations.{name}", "a command takes no methods. Use an experiment, or add them in the program"
    wanted = [name for name, options in chosen.items() if name in CONFIGURABLE and options is not False]
    try:
        check_combination(CONFIGURABLE[name] for name in wanted)
    except UnsupportedError as error:
        yield "optimisations", str(error)
