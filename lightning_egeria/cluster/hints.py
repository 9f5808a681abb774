"""What a running job tells a scheduler about itself, as a small JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning_egeria.cluster.goodput import BatchLimits, Goodput
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.core.programs.files import read_json, write_whole
from lightning_egeria.errors import TraceError

VERSION = 1
MAX_BYTES = 2**16
_LARGEST_COUNT, _LARGEST = 2**31 - 1, 1e18  # of samples and replicas; of all other numbers


@dataclasses.dataclass(frozen=True)
class Hints:
    """What a job knows of its own speed. A job tells what it knows, and leaves out the rest.

    Attributes:
        limits: on the batch size; None if it stays.
        profiled: most replicas it has run on.
        progress: scale-invariant steps so far: a step counts as many as it gains over one at the initial batch size.
        squared_norm: estimate of ``|G|^2`` of a gradient at the initial batch size; None before there is one.
        variance: estimate of ``tr(Sigma)`` of a gradient at the initial batch size; None before there is one.
        throughput: fitted to its measured steps; None before there are any.
        unfrozen: the throughput it would have if it had frozen no layers; None if it has frozen none.
        seconds_left: until it ends, on the devices that it has; None before that is known.
    """

    limits: BatchLimits | None = None
    profiled: int = 0
    progress: float = 0.0
    squared_norm: float | None = None
    variance: float | None = None
    throughput: ThroughputModel | None = None
    unfrozen: ThroughputModel | None = None
    seconds_left: float | None = None

    def goodput(self) -> Goodput | None:
        """Return the goodput with the layers that are frozen now; None before it is known."""
        return self._goodput(self.throughput)

    def unfrozen_goodput(self) -> Goodput | None:
        """Return the goodput if nothing were frozen; None if nothing is, or before it is known."""
        return self._goodput(self.unfrozen)

    def _goodput(self, throughput: ThroughputModel | None) -> Goodput | None:
        if self.limits is None or throughput is None or self.squared_norm is None or self.variance is None:
            return None
        return Goodput(throughput, self.squared_norm, self.variance, self.limits)

    def write(self, path: Path) -> None:
        """Replace the file at once, so that a reader sees the old or the new one whole."""
        write_whole(path, json.dumps({"version": VERSION, **dataclasses.asdict(self)}, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Hints:
        """Read the hints of a job.

        Raises:
            TraceError: the file cannot be read, or holds no hints of this version.
        """
        try:
            state = read_json(path, MAX_BYTES, links=False)
            if state.pop("version") != VERSION:
                raise ValueError(f"expected version {VERSION}")
            hints = cls(
                limits=_if_known(_limits, state.pop("limits", None)),
                profiled=_count(state.pop("profiled", 0), least=0),
                progress=_number(state.pop("progress", 0)),
                squared_norm=_if_known(_number, state.pop("squared_norm", None)),
                variance=_if_known(_number, state.pop("variance", None)),
                throughput=_if_known(_throughput, state.pop("throughput", None)),
                unfrozen=_if_known(_throughput, state.pop("unfrozen", None)),
                seconds_left=_if_known(_number, state.pop("seconds_left", None)),
            )
            if state:
                raise ValueError(f"unknown {', '.join(state)}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise TraceError(f"{path} is not a hints file of a job: {error}") from error
        return hints


_Known = TypeVar("_Known")


def _if_known(read: Callable[[Any], _Known], value: Any) -> _Known | None:
    return None if value is None else read(value)


def _limits(value: dict[str, Any]) -> BatchLimits:
    limits = BatchLimits(**{name: _count(size) for name, size in value.items()})
    if limits.initial > limits.largest or limits.smallest_local > limits.largest_local:
        raise ValueError(f"expected a range of batch sizes, got {limits}")
    return limits


def _throughput(value: dict[str, Any]) -> ThroughputModel:
    gamma = _number(value["gamma"])
    if not 1 <= gamma <= 10 or len(value) != 4:
        raise ValueError(f"expected three pairs and gamma in [1, 10], got {value!r:.200}")
    return ThroughputModel(_pair(value["compute"]), _pair(value["between"]), _pair(value["within"]), gamma)


def _pair(value: Any) -> tuple[float, float]:
    first, second = value
    return _number(first), _number(second)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"expected a number from 0 to {_LARGEST:g}, got {value!r:.40}")
    return float(value)


def _count(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= _LARGEST_COUNT:
        raise ValueError(f"expected an integer from {least} to {_LARGEST_COUNT}, got {value!r:.40}")
    return value
