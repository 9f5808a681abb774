"""The results of a workload, read from their files, and the time that each run takes on a machine of its own."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.proof.workloads import RESULTS, WORKLOADS


@dataclasses.dataclass(frozen=True)
class Point:
    """A validation of a run.

    Attributes:
        step: optimizer steps done.
        seconds: of training until then: steps of each kind times what such a step costs.
        raw_seconds: as a clock has shown them, with whatever else the machine did.
        value: of the workload's metric.
    """

    step: int
    seconds: float
    raw_seconds: float
    value: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a workload.

    Attributes:
        method: that decided what freezes.
        seed: of everything random.
        steps: optimizer steps.
        points: its validations.
        events: each freeze and unfreeze.
        layer_modules: their names; empty without freezing.
        comparing: seconds of all training steps that went into comparing with the reference.
        about: hardware and versions.
    """

    method: str
    seed: int
    steps: int
    points: tuple[Point, ...]
    events: tuple[Mapping[str, Any], ...]
    layer_modules: tuple[str, ...]
    comparing: float
    about: Mapping[str, str]

    @property
    def seconds(self) -> float:
        """Of all training steps."""
        return self.points[-1].seconds

    @property
    def final(self) -> float:
        """Metric at the end."""
        return self.points[-1].value

    @property
    def final_depth(self) -> int:
        """Frozen at the end."""
        return self.events[-1]["depth"] if self.events else 0

    def seconds_to(self, target: float) -> float | None:
        """Training time until the metric is first as good as ``target``; None: never."""
        return next((point.seconds for point in self.points if point.value >= target), None)


def share_of(kind: str, shares: Mapping[str, float]) -> float:
    """What a step of a kind costs, as a share of a full step.

    A kind that was not measured costs as much as the one of the nearest depth that was, of those that do the same, or
    else of the next in this row: steps from shallower entries, steps that write, steps without the cache, and again
    steps that write. A forward that scores samples and was not measured costs a third of a full step, or half
    of a cached one.
    """
    if kind == "0":
        return 1.0
    if kind in shares:
        return shares[kind]
    if kind.endswith(" hit score"):
        return share_of(kind.removesuffix(" score"), shares) / 2
    if kind.endswith(" score"):  # a forward, whatever is frozen
        return shares.get("0 score", 1 / 3)
    depth, _, what = kind.partition(" ")
    grown = tuple(other.partition(" ")[2] for other in shares if " from " in other)
    row = {"": [], "off": [], "hit": [("hit",)], "miss": [("miss",)]}.get(what, [(what,), grown, ("miss",)])
    for same in [*row, ("", "off"), ("miss",)]:
        near = [other for other in shares if other.partition(" ")[2] in same]
        if near:
            distances = {other: (abs(int(other.split()[0]) - int(depth)), not other.endswith(what)) for other in near}
            return shares[min(near, key=distances.__getitem__)]
    raise KeyError(f"the cost of a step of kind {kind!r} was not measured")


@functools.cache
def costs_of(workload: str, size: str) -> Mapping[str, Any]:
    """What `costs.py` has measured; KeyError if it has not."""
    path = RESULTS / workload / size / "costs.json"
    if not path.is_file():
        raise KeyError(f"{path} is not there: python -m benchmarks.proof.costs {workload} --size {size}")
    costs: Mapping[str, Any] = json.loads(path.read_text())
    return costs


def read(path: Path) -> Run:
    """Read the file of a run."""
    state = json.loads(path.read_text())
    costs, metric = costs_of(state["workload"], state["size"]), WORKLOADS[state["workload"]].metric
    # Comparing with the reference is measured where it happens, beside the steps of the same run.
    raw = state["curve"][-1]["seconds"]
    comparing = state["evaluation_seconds"] / raw
    full = costs["full"] / (1 - comparing)
    points = [
        Point(
            point["step"],
            full * sum(count * share_of(kind, costs["shares"]) for kind, count in point["batches"].items()),
            point["seconds"],
            point["metrics"][metric],
        )
        for point in state["curve"]
    ]
    return Run(
        state["method"],
        state["seed"],
        state["steps"],
        tuple(points),
        tuple(state["events"]),
        tuple(state["layer_modules"]),
        comparing * points[-1].seconds,
        state["about"],
    )


def read_all(workload: str, size: str) -> list[Run]:
    """All runs of a workload that were done, by method and seed."""
    paths = sorted((RESULTS / workload / size).glob("*-*.json"))
    return sorted((read(path) for path in paths), key=lambda run: (run.method, run.seed))
