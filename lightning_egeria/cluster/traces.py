"""Measured traces of an application, and what lies between their points.

A folder of traces has, for an application:

* ``placements.csv``: ``placement,local_bsz,step_time,sync_time``. A placement is written as the devices on each node:
  31 is three devices on one node and one on another, as is 13. Times are seconds; ``sync_time`` is the part of a step
  that exchanges gradients.
* ``scalability.csv``: ``num_nodes,num_replicas,local_bsz,step_time,sync_time``, for larger placements.
* ``validation-B.csv`` of a run with batch size B: ``progress,iteration,metric,grad_sqr,grad_var``, one line an epoch.
  Progress counts steps at the initial batch size that would teach as much. The last two are the squared norm and the
  variance of a gradient at the initial batch size.

This is the format of the traces that Pollux (Qiao et al., OSDI 2021) published.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError

from lightning_egeria.cluster.tables import Table, read_table
from lightning_egeria.errors import TraceError

MOST_NODES = 16  # the published traces have no larger placement
LONGEST_S = 1e8  # three years: a simulation takes as many intervals as its jobs


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an application's traces do not say.

    Attributes:
        epochs: length of a job; None for all that were recorded.
        largest_local: local batch size that fits in memory; None for the largest measured one.
        most_replicas: when the policy chooses; None for no limit.
        batch_size: when the policy chooses; None if it may change.
    """

    epochs: int | None = None
    largest_local: int | None = None
    most_replicas: int | None = None
    batch_size: int | None = None


# Of the published applications. Others have none.
LIMITS = {
    "bert": Limits(epochs=2),
    "cifar10": Limits(epochs=100),
    "ncf": Limits(epochs=10, most_replicas=1, batch_size=32768),
    "imagenet": Limits(epochs=90),
    "deepspeech2": Limits(epochs=80),
    "yolov3": Limits(epochs=50, largest_local=8),
}


class Application:
    """What a job of this kind does on any placement, at any batch size, in any epoch.

    Args:
        name: of the application.
        placements: columns of ``placements.csv``.
        scalability: columns of ``scalability.csv``.
        validation: columns of ``validation-B.csv`` by B.
        limits: what these do not say.

    Raises:
        TraceError: there is no validation run, there are fewer epochs than ``limits`` names, or a job would take years.
    """

    def __init__(
        self, name: str, placements: Table, scalability: Table, validation: dict[int, Table], limits: Limits
    ) -> None:
        self.name, self.limits = name, limits
        if not validation:
            raise TraceError(f"{name} has no validation-*.csv: expected one for each batch size that was tried")
        self._validation = {size: validation[size] for size in sorted(validation)}
        recorded = min(len(table["progress"]) for table in validation.values())
        self.epochs = limits.epochs or recorded
        if self.epochs > recorded:
            raise TraceError(f"{name} has {recorded} epochs in each validation-*.csv, expected {self.epochs}")
        longest = self.progress_at(self.epochs) * max(placements["step_time"].max(), scalability["step_time"].max())
        if longest > LONGEST_S:
            raise TraceError(f"{name} takes up to {longest:.2g} s by progress and step_time, expected {LONGEST_S:g}")
        self.initial_batch_size, self.largest_batch_size = min(validation), max(validation)
        self.smallest_local = int(placements["local_bsz"].min())
        self.largest_local = limits.largest_local or int(placements["local_bsz"].max())
        self._measured: dict[tuple[int, ...], NDArray[np.float64]] = {}
        times = np.column_stack([placements[column] for column in ("local_bsz", "step_time", "sync_time")])
        by_size = np.argsort(times[:, 0], kind="stable")
        times, keys = times[by_size], placements["placement"][by_size].astype(int)
        for key in np.unique(keys):
            self._measured[tuple(map(int, str(key)))] = times[keys == key]
        self._scalability = scalability
        self._interpolate = functools.cache(self._interpolated)
        self.step_times = functools.cache(self._step_times)
        self.gradient = functools.cache(self._gradient)

    @classmethod
    def read(cls, folder: Path, limits: Limits | None = None) -> Application:
        """Read the traces of one application.

        Args:
            folder: with the files that the module describes; its name is the application's.
            limits: default: those of the published application of this name, or none.

        Raises:
            TraceError: a file is missing or damaged.
        """
        validation = {}
        for path in folder.glob("validation-*.csv"):
            size = path.stem.removeprefix("validation-")
            if not re.fullmatch("[1-9][0-9]{0,8}", size):
                raise TraceError(f"{path} has no batch size in its name: expected validation-128.csv, for example")
            validation[int(size)] = read_table(path, ("progress", "iteration", "metric", "grad_sqr", "grad_var"))
        times = ("local_bsz", "step_time", "sync_time")
        return cls(
            folder.name,
            read_table(folder / "placements.csv", ("placement", *times), keys=2),
            read_table(folder / "scalability.csv", ("num_nodes", "num_replicas", *times), keys=3),
            validation,
            limits or LIMITS.get(folder.name, Limits()),
        )

    def progress_at(self, epoch: int) -> float:
        """Return the progress at which ``epoch`` epochs have passed: the smallest of all validation runs."""
        if epoch == 0:
            return 0.0
        return float(min(table["progress"][epoch - 1] for table in self._validation.values()))

    def iterations(self, batch_size: int, epoch: int) -> float:
        """Return the steps that a run with ``batch_size`` has made when it ends the epoch with this index."""
        return self._between(batch_size, "iteration", epoch)

    def _gradient(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Return squared norm and variance of a gradient during the epoch with this index."""
        return self._between(batch_size, "grad_sqr", epoch), self._between(batch_size, "grad_var", epoch)

    def _between(self, batch_size: int, column: str, epoch: int) -> float:
        sizes = list(self._validation)
        if not sizes[0] <= batch_size <= sizes[-1]:
            raise TraceError(f"{self.name} was recorded with batch sizes {sizes[0]} to {sizes[-1]}, not {batch_size}")
        below = max(size for size in sizes if size <= batch_size)
        above = min(size for size in sizes if size >= batch_size)
        low, high = (float(self._validation[size][column][epoch]) for size in (below, above))
        if below == above:
            return low
        return ((batch_size - below) * high + (above - batch_size) * low) / (above - below)

    def _step_times(self, placement: tuple[int, ...], local_batch_size: int) -> tuple[float, float]:
        """Return the seconds of a step, and those of it that exchange gradients.

        A measured placement is interpolated over the local batch size. Another one is interpolated over nodes, replicas
        and local batch size, between the means of all measured ones.

        Args:
            placement: devices on each node. Its rotations are the same.
            local_batch_size: samples on each device.

        Raises:
            TraceError: the traces do not reach this far.
        """
        placement = min(placement[i:] + placement[:i] for i in range(len(placement)))
        if placement in self._measured:
            sizes, step, sync = self._measured[placement].T
            if sizes[0] <= local_batch_size <= sizes[-1]:
                return float(np.interp(local_batch_size, sizes, step)), float(np.interp(local_batch_size, sizes, sync))
        else:
            nodes = min(len(placement), MOST_NODES)
            step_time, sync_time = self._interpolate(nodes, sum(placement), local_batch_size)
            if not math.isnan(step_time):
                return step_time, sync_time
        raise TraceError(f"{self.name} has no traces around placement {placement}, local batch size {local_batch_size}")

    def _interpolated(self, nodes: int, replicas: int, local_batch_size: int) -> tuple[float, float]:
        step, sync = self._interpolator([nodes, replicas, local_batch_size])[0]
        return float(step), float(sync)

    @functools.cached_property
    def _interpolator(self) -> Any:
        groups: dict[tuple[float, ...], list[NDArray[np.float64]]] = {}
        for placement, rows in self._measured.items():
            for local, *times in rows:
                groups.setdefault((len(placement), sum(placement), local), []).append(np.array(times))
        points = [list(key) for key in sorted(groups)]
        times = [list(np.mean(groups[key], axis=0)) for key in sorted(groups)]
        columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        for row in zip(*(self._scalability[column] for column in columns), strict=True):
            points.append(list(row[:3]))
            times.append(list(row[3:]))
        # Points on a grid have more than one Delaunay triangulation; their order decides which one it is.
        try:
            return LinearNDInterpolator(np.array(points), np.array(times))
        except QhullError as error:
            raise TraceError(
                f"{self.name} has too few placements to predict the times of others: expected several numbers of "
                "nodes, replicas and samples on each"
            ) from error


def read_applications(folder: Path, names: Sequence[str]) -> dict[str, Application]:
    """Read the traces of several applications, each from its folder in ``folder``.

    Raises:
        TraceError: a folder is missing, or a file in it is missing or damaged.
    """
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing:
        raise TraceError(
            f"there are no traces of {', '.join(sorted(missing))} in {folder}: expected one folder for each"
        )
    return {name: Application.read(folder / name) for name in names}
