"""The record of a run for its figures: plain numbers, in one small JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec
from msgspec import Meta

from lightning_egeria.core.programs.files import read_at_most, write_whole
from lightning_egeria.core.training.panels import Panel, Real
from lightning_egeria.errors import RecordError
from lightning_egeria.freezing.savings import Savings

FILE_NAME = "egeria.json"
VERSION = 1
LONGEST = 2000  # entries of a series; beyond it, neighbours are merged
MOST_LAYERS, MOST_PANELS = 4096, 64  # of a record to read
LARGEST_BYTES = 2**26  # size of a file to read, which takes up to twenty times as much memory

Whole = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Count = Annotated[int, Meta(ge=1, le=2**62)]


class Event(TypedDict):
    """A freeze or unfreeze; see `FreezingEvent`."""

    step: Whole
    kind: str
    depth: Whole
    reason: str


class StepTimes(msgspec.Struct, forbid_unknown_fields=True):
    """Mean seconds of consecutive training batches at one frozen depth.

    Attributes:
        step: number of optimizer steps after the last of them.
        batches: number of batches.
        depth: frozen depth.
        data: waiting for the batch.
        forward: from the arrival of the batch to the loss.
        backward: from the loss to the last gradient, without ``communication``.
        communication: waiting for other processes, where the backward did not hide it.
        rest: optimizer, logging, other callbacks.
    """

    step: Whole
    batches: Count
    depth: Whole
    data: Real
    forward: Real
    backward: Real
    communication: Real
    rest: Real

    @property
    def seconds(self) -> float:
        """Seconds of one batch, the sum of all phases."""
        return self.data + self.forward + self.backward + self.communication + self.rest

    def joined(self, other: StepTimes) -> StepTimes:
        """Merge with the later ``other``.

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


class EvaluationPoint(msgspec.Struct, forbid_unknown_fields=True):
    """One comparison with the reference.

    Attributes:
        step: number of optimizer steps when the policy saw the result.
        plasticity: plasticity of each layer module; None where not measured.
        slopes: slope of each layer module's smoothed plasticity; None where there is none.
    """

    step: Whole
    plasticity: list[Real | None]
    slopes: list[Real | None]


class MetricPoint(msgspec.Struct, forbid_unknown_fields=True):
    """Logged metrics at one moment.

    Attributes:
        step: number of optimizer steps so far.
        seconds: wall time since training began, validation included.
        values: metrics by name.
    """

    step: Whole
    seconds: Real
    values: dict[str, Real]


class CachePoint(msgspec.Struct, forbid_unknown_fields=True):
    """Statistics of the cache at one moment.

    Attributes:
        step: number of optimizer steps so far.
        hits: samples that skipped all frozen layers.
        advanced: samples that were computed from another cached value.
        misses: samples that ran all frozen layers.
        bytes_on_disk: size of the cache.
    """

    step: Whole
    hits: Whole
    advanced: Whole
    misses: Whole
    bytes_on_disk: Whole


class RunRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The record of a run, written by `RunRecorder`.

    Attributes:
        name: name of the run.
        about: versions, hardware, the command.
        layer_modules: names of the layer modules, front to back; empty without freezing.
        events: every freeze and unfreeze.
        evaluations: comparisons with the reference.
        steps: times of the training batches.
        metrics: logged metrics over time.
        cache: statistics of the cache over time.
        savings: savings of the whole run; None without freezing.
        overrides: settings of this run, as ``key=value``.
        panels: figures of the methods that trained.
        version: version of the format.
    """

    name: str
    about: dict[str, str] = msgspec.field(default_factory=dict)
    layer_modules: Annotated[list[str], Meta(max_length=MOST_LAYERS)] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)
    evaluations: list[EvaluationPoint] = msgspec.field(default_factory=list)
    steps: list[StepTimes] = msgspec.field(default_factory=list)
    metrics: list[MetricPoint] = msgspec.field(default_factory=list)
    cache: list[CachePoint] = msgspec.field(default_factory=list)
    savings: Savings | None = None
    overrides: list[str] = msgspec.field(default_factory=list)
    panels: Annotated[list[Panel], Meta(max_length=MOST_PANELS)] = msgspec.field(default_factory=list)
    version: int = VERSION

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file. Another process sees the complete old or new file, never a part."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(msgspec.to_builtins(self), allow_nan=False, ensure_ascii=False)
        # The name of a folder, and so of a run, may hold bytes that are not text.
        write_whole(path, text.encode(errors="replace").decode())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read a record from its file, or from the directory of the file.

        Raises:
            RecordError: if there is no record, it is damaged, or it has another version.
        """
        path = record_file(path)
        try:
            content = read_at_most(path, LARGEST_BYTES)
        except OSError as error:
            raise RecordError(
                f"cannot read {path} as the record of a run: {error}. RunRecorder() writes one"
            ) from error
        try:
            version = msgspec.json.decode(content, type=_Head).version
        except msgspec.ValidationError:
            version = None
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is damaged: {error}") from error
        if version != VERSION:
            raise RecordError(f"{path} is not a record of version {VERSION}. Use the lightning_egeria that wrote it")
        try:
            return msgspec.json.decode(content, type=cls)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is damaged: {error}") from error

    def add_step(self, times: StepTimes) -> None:
        """Add the times of the latest batch."""
        self.steps.append(times)
        if len(self.steps) > LONGEST:
            self.steps = list(_joined_pairs(self.steps))

    def add_evaluation(self, point: EvaluationPoint) -> None:
        """Add the latest evaluation."""
        self.evaluations.append(point)
        if len(self.evaluations) > LONGEST:
            self.evaluations = self.evaluations[1::2]

    def typical_times(self, depth: int) -> StepTimes | None:
        """Return the mean over the middle half of the batches at a frozen depth, sorted by time; None without batches.

        This leaves out compilations and pauses of the machine.
        """
        found = sorted((times for times in self.steps if times.depth == depth), key=lambda times: times.seconds)
        if not found:
            return None
        quarter = sum(times.batches for times in found) / 4
        typical: StepTimes | None = None
        passed = 0
        for times in found:
            middle = passed + times.batches / 2
            passed += times.batches
            if quarter <= middle <= 3 * quarter:
                typical = times if typical is None else typical.joined(times)
        return typical


class _Head(msgspec.Struct):
    version: int | None = None


def record_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of a record, from its path or the path of its directory."""
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def finite(values: Iterable[float]) -> list[float | None]:
    """Return the values, with None for those that JSON cannot represent.

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
