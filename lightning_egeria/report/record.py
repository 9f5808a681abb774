"""What is kept of a run for its pictures: plain numbers, in one small JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_egeria.errors import RecordError

FILE_NAME = "egeria.json"
VERSION = 1
LONGEST = 2000  # entries of each series: when there are more, neighbours are put together


@dataclasses.dataclass
class StepTimes:
    """Training batches next to each other at one frozen depth, and their mean seconds.

    Attributes:
        step: optimizer steps done after the last of them.
        batches: how many they are.
        depth: frozen depth.
        data: waiting for the batch.
        forward: from its arrival to the loss.
        backward: of the loss, without what follows.
        communication: waiting for other processes, as far as the backward did not hide it.
        rest: optimizer, logging, other callbacks.
    """

    step: int
    batches: int
    depth: int
    data: float
    forward: float
    backward: float
    communication: float
    rest: float

    @property
    def seconds(self) -> float:
        """Of one batch, all in all."""
        return self.data + self.forward + self.backward + self.communication + self.rest

    def joined(self, other: StepTimes) -> StepTimes:
        """Both together; ``other`` comes later.

        >>> first = StepTimes(1, 1, 0, 0.0, 1.0, 2.0, 0.0, 0.0)
        >>> first.joined(StepTimes(4, 3, 0, 0.0, 2.0, 2.0, 0.0, 0.0))
        StepTimes(step=4, batches=4, depth=0, data=0.0, forward=1.75, backward=2.0, communication=0.0, rest=0.0)
        """
        count = self.batches + other.batches
        means = {
            name: (getattr(self, name) * self.batches + getattr(other, name) * other.batches) / count
            for name in ("data", "forward", "backward", "communication", "rest")
        }
        return StepTimes(other.step, count, self.depth, **means)


@dataclasses.dataclass
class EvaluationPoint:
    """One comparison with the reference.

    Attributes:
        step: optimizer steps done when its result was used.
        plasticity: of each layer module; None where it was not measured.
        slopes: of the smoothed plasticity; None where there is none.
    """

    step: int
    plasticity: list[float | None]
    slopes: list[float | None]


@dataclasses.dataclass
class MetricPoint:
    """Logged metrics at one moment.

    Attributes:
        step: optimizer steps done.
        seconds: of wall time since training began, validation included.
        values: by name.
    """

    step: int
    seconds: float
    values: dict[str, float]


@dataclasses.dataclass
class CachePoint:
    """What the cache had done at one moment; counts are of samples.

    Attributes:
        step: optimizer steps done.
        hits: whose frozen layers were left out.
        advanced: that came from a shallower boundary.
        misses: that ran all of the frozen layers.
        bytes_on_disk: of what is cached.
    """

    step: int
    hits: int
    advanced: int
    misses: int
    bytes_on_disk: int


@dataclasses.dataclass
class RunRecord:
    """A run, as `RunRecorder` has seen it.

    Attributes:
        name: of the run.
        about: versions, hardware, the command.
        layer_modules: their names, front to back; empty without freezing.
        events: each freeze and unfreeze: ``step``, ``kind``, ``depth``, ``reason``.
        evaluations: comparisons with the reference.
        steps: times of the training steps.
        metrics: logged metrics over time.
        cache: the cache over time.
        savings: of the whole run, as `Savings.to_dict` gives them; None without freezing.
    """

    name: str
    about: dict[str, str] = dataclasses.field(default_factory=dict)
    layer_modules: list[str] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evaluations: list[EvaluationPoint] = dataclasses.field(default_factory=list)
    steps: list[StepTimes] = dataclasses.field(default_factory=list)
    metrics: list[MetricPoint] = dataclasses.field(default_factory=list)
    cache: list[CachePoint] = dataclasses.field(default_factory=list)
    savings: dict[str, Any] | None = None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file; whoever reads it at the same time sees the old or the new one, whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps({"version": VERSION, **dataclasses.asdict(self)}, allow_nan=False))
        beside.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read what `write` has written, from the file or from the directory that holds it.

        Raises:
            RecordError: there is no record, or it is damaged or of another version.
        """
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{path} cannot be read as the record of a run: {error}. Add RunRecorder() to the Trainer's callbacks"
            ) from error
        if not isinstance(state, dict) or state.pop("version", None) != VERSION:
            raise RecordError(f"{path} is not a record of version {VERSION}, which this version of the package reads")
        kinds = {
            "evaluations": EvaluationPoint,
            "steps": StepTimes,
            "metrics": MetricPoint,
            "cache": CachePoint,
        }
        try:
            for field, kind in kinds.items():
                state[field] = [kind(**entry) for entry in state[field]]
            return cls(**state)
        except (TypeError, KeyError) as error:
            raise RecordError(f"{path} is damaged: {error}") from error

    def add_step(self, times: StepTimes) -> None:
        """Add the times of the newest batch."""
        self.steps.append(times)
        if len(self.steps) > LONGEST:
            self.steps = list(_joined_pairs(self.steps))

    def add_evaluation(self, point: EvaluationPoint) -> None:
        """Add the newest evaluation."""
        self.evaluations.append(point)
        if len(self.evaluations) > LONGEST:
            self.evaluations = self.evaluations[1::2]

    def mean_times(self, depth: int) -> StepTimes | None:
        """Mean of all steps at a frozen depth; None if there are none."""
        found: StepTimes | None = None
        for times in self.steps:
            if times.depth == depth:
                found = times if found is None else found.joined(times)
        return found


def finite(values: Iterable[float]) -> list[float | None]:
    """The values, None for those that JSON cannot say.

    >>> finite([1.0, math.nan])
    [1.0, None]
    """
    return [value if math.isfinite(value) else None for value in values]


def _joined_pairs(steps: Sequence[StepTimes]) -> Iterable[StepTimes]:
    pending: StepTimes | None = None
    for times in steps:
        if pending is None:
            pending = times
        elif pending.depth == times.depth:
            yield pending.joined(times)
            pending = None
        else:
            yield pending
            pending = times
    if pending is not None:
        yield pending
