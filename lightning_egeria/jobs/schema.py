"""The description of a job: dataclasses that Hydra and OmegaConf take as a structured config."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.core.programs.arguments import PERIOD, SIZE
from lightning_egeria.core.programs.descriptions import key

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
VARIABLE = r"(?!EGERIA_)[A-Za-z_][A-Za-z0-9_]*"
OPTION_NAME = r"[a-z][a-z-]*"
OPTION = r"[A-Za-z0-9][A-Za-z0-9._,:=*&|()\[\]+/@%-]*"

_COMMAND = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_METHOD_OPTIONS = {"anyOf": [{"type": "boolean"}, {"type": "object"}]}
_METHODS = {
    "anyOf": [
        {"enum": ["auto", "none"]},
        {"type": "object", "properties": dict.fromkeys(CONFIGURABLE, _METHOD_OPTIONS), "additionalProperties": False},
    ]
}


@dataclasses.dataclass
class Entry:
    """What runs: an experiment of `egeria-train`, or any command."""

    experiment: str | None = dataclasses.field(
        default=None, metadata=key("experiment of egeria-train; 'default' for none of conf/experiment")
    )
    overrides: list[str] = dataclasses.field(
        default_factory=list, metadata=key("overrides of the experiment, key=value", pattern=r"[^\n\x00]+")
    )
    command: Any = dataclasses.field(
        default=None, metadata=key("a list of arguments, or a line for sh", form=_COMMAND, nullable=True)
    )
    files: list[str] = dataclasses.field(
        default_factory=list, metadata=key("files that the command needs: patterns below the folder of the description")
    )


@dataclasses.dataclass
class Environment:
    """With which packages and variables it runs."""

    requirements: str | None = dataclasses.field(
        default=None, metadata=key("file of requirements, resolved to a lock when the job is compiled")
    )
    lock: str | None = dataclasses.field(default=None, metadata=key("file of requirements with exact versions"))
    variables: dict[str, str] = dataclasses.field(
        default_factory=dict, metadata=key("environment variables", keys=VARIABLE, pattern=r"[^\x00]*")
    )
    secrets: list[str] = dataclasses.field(
        default_factory=list,
        metadata=key("names of environment variables that the job gets and that are written nowhere", pattern=VARIABLE),
    )


@dataclasses.dataclass
class Resources:
    """What it needs."""

    nodes: int = dataclasses.field(default=1, metadata=key("machines", least=1))
    devices: int = dataclasses.field(
        default=1, metadata=key("devices of each node: GPUs where there are any, else processor cores", least=1)
    )
    most_devices: int | None = dataclasses.field(
        default=None,
        metadata=key("devices that it can use, from 1 on; the queue may change their number while it runs", least=1),
    )
    cpus_per_device: int | None = dataclasses.field(
        default=None, metadata=key("processor cores beside each GPU, for loading data", least=1)
    )
    memory: str | None = dataclasses.field(
        default=None, metadata=key("of each node, as in 16GB; Slurm holds the job to it", pattern=SIZE)
    )
    time: str | None = dataclasses.field(
        default=None, metadata=key("longest time of one attempt, as in 90m or 2h", pattern=PERIOD)
    )


@dataclasses.dataclass
class SlurmOptions:
    """Options of sbatch, for Slurm only."""

    partition: str | None = dataclasses.field(default=None, metadata=key("partition", pattern=OPTION))
    account: str | None = dataclasses.field(default=None, metadata=key("account", pattern=OPTION))
    qos: str | None = dataclasses.field(default=None, metadata=key("quality of service", pattern=OPTION))
    constraint: str | None = dataclasses.field(default=None, metadata=key("features of the nodes", pattern=OPTION))
    extra: dict[str, str] = dataclasses.field(
        default_factory=dict,
        metadata=key("further options by their long names, without dashes", keys=OPTION_NAME, pattern=OPTION),
    )


@dataclasses.dataclass
class DataSet:
    """Data that the job reads. Its path is in the variable `EGERIA_DATA_` and the name in capitals."""

    path: str = dataclasses.field(metadata=key("file or folder; relative to the description", pattern=r"[^\x00\n]+"))
    digest: str | None = dataclasses.field(
        default=None, metadata=key("as `egeria jobs digest PATH` prints it", pattern=r"sha256:[0-9a-f]{64}")
    )
    stage: bool = dataclasses.field(default=False, metadata=key("copy it to the job's own folder first"))


@dataclasses.dataclass
class Checkpoints:
    """How often it saves, and how long it may take to save when it is stopped."""

    every_steps: int | None = dataclasses.field(
        default=None, metadata=key("optimizer steps between two checkpoints; at each epoch's end if left out", least=1)
    )
    grace: str = dataclasses.field(
        default="60s", metadata=key("time between the signal to stop and the end", pattern=PERIOD)
    )


@dataclasses.dataclass
class Notifications:
    """Commands to run when the job gets there. EGERIA_JOB_ID, _NAME and _STATE are set."""

    done: list[str] = dataclasses.field(default_factory=list, metadata=key("arguments of a command"))
    failed: list[str] = dataclasses.field(default_factory=list, metadata=key("arguments of a command"))
    preempted: list[str] = dataclasses.field(default_factory=list, metadata=key("arguments of a command"))


@dataclasses.dataclass
class Queueing:
    """Its place among other jobs."""

    priority: int = dataclasses.field(default=0, metadata=key("higher goes first"))
    after: list[str] = dataclasses.field(
        default_factory=list, metadata=key("ids of jobs that must be done first", pattern=r"[0-9]{1,18}")
    )


@dataclasses.dataclass
class Job:
    """A job."""

    name: str = dataclasses.field(metadata=key("letters, digits, . _ -", pattern=_NAME))
    entry: Entry = dataclasses.field(metadata=key("what runs"))
    environment: Environment = dataclasses.field(default_factory=Environment, metadata=key("packages and variables"))
    resources: Resources = dataclasses.field(default_factory=Resources, metadata=key("devices, memory and time"))
    slurm: SlurmOptions = dataclasses.field(default_factory=SlurmOptions, metadata=key("options of sbatch"))
    data: dict[str, DataSet] = dataclasses.field(
        default_factory=dict, metadata=key("data sets by name", keys=r"[a-z][a-z0-9_]*")
    )
    optimisations: Any = dataclasses.field(
        default="auto", metadata=key("auto, none, or methods with true, false or options", form=_METHODS)
    )
    retries: int = dataclasses.field(default=0, metadata=key("attempts after the first one that fails", least=0))
    checkpoints: Checkpoints = dataclasses.field(default_factory=Checkpoints, metadata=key("when it saves"))
    notifications: Notifications = dataclasses.field(default_factory=Notifications, metadata=key("hooks"))
    queue: Queueing = dataclasses.field(default_factory=Queueing, metadata=key("its place among other jobs"))
    sweep: dict[str, list[str]] = dataclasses.field(
        default_factory=dict,
        metadata=key("one job for each combination of overrides, or of variables of a command", keys=r"[^\s=\x00]+"),
    )
