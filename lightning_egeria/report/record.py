"""What is kept of a run for its pictures: plain numbers, in one small JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_egeria.errors import RecordError

FILE_NAME = "egeria.json"
VERSION = 1
LONGEST = 2000  # entries of each series: when there are more, neighbours are put together
LARGEST_BYTES = 2**28  # of a file that is read
_EVENT = {"step": int, "kind": str, "depth": int, "reason": str}


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
        try:
            beside.write_text(json.dumps({"version": VERSION, **dataclasses.asdict(self)}, allow_nan=False))
            beside.replace(path)
        except OSError:  # the disk is full, say
            beside.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read what `write` has written, from the file or from the directory that holds it.

        Raises:
            RecordError: there is no record, or it is damaged or of another version.
        """
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            state = json.loads(_text_of(path))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(
                f"{path} cannot be read as the record of a run: {error}. Add RunRecorder() to the Trainer's callbacks"
            ) from error
        if not isinstance(state, dict) or state.pop("version", None) != VERSION:
            raise RecordError(f"{path} is not a record of version {VERSION}, which this version of the package reads")
        try:
            record: RunRecord = _of_type(cls, state, "the record")
            for event in record.events:
                for name, kind in _EVENT.items():
                    event[name] = _of_type(kind, event.get(name), f"{name!r} of an event")
            if record.savings is not None:
                _of_type(float | None, record.savings.get("seconds_saved"), "'seconds_saved'")
        except TypeError as error:
            raise RecordError(f"{path} is damaged: {error}") from error
        if any(times.batches < 1 for times in record.steps):
            raise RecordError(f"{path} is damaged: there are steps without a batch")
        return record

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


def _text_of(path: Path) -> str:
    """What stands in a file.

    Raises:
        OSError: it cannot be read, or cannot be a record: a pipe, say, or a file without an end.
        ValueError: it is no text.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_BYTES:
        raise OSError(f"it is no file, or larger than {LARGEST_BYTES} bytes")
    return path.read_text(encoding="utf-8")


_FIELDS: dict[Any, dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (RunRecord, EvaluationPoint, StepTimes, MetricPoint, CachePoint)
}


def _of_type(kind: Any, value: Any, where: str) -> Any:
    """What stands at some place of a JSON file, as the type that belongs there.

    Numbers are finite, and texts can be written to any file.

    Raises:
        TypeError: it is something else.
    """
    whole, parts = get_origin(kind), get_args(kind)
    if whole in (types.UnionType, Union):
        return None if value is None else _of_type(parts[0], value, where)
    fields = _FIELDS.get(kind)
    if fields is not None and type(value) is dict and value.keys() == fields.keys():
        return kind(**{name: _of_type(fields[name], value[name], repr(name)) for name in fields})
    if whole is list and type(value) is list:
        inside = f"an entry of {where}"
        return [_of_type(parts[0], entry, inside) for entry in value]
    if whole is dict and type(value) is dict:
        return {_of_type(str, key, where): _of_type(parts[1], entry, where) for key, entry in value.items()}
    if kind is str and type(value) is str:
        return value.encode(errors="replace").decode()
    if kind is int and type(value) is int and abs(value) < 2**63:
        return value
    if kind is float and type(value) in (int, float) and abs(value) < 1e300:
        return value
    if kind is Any:
        return value
    raise TypeError(f"{where} is not what it should be")


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
