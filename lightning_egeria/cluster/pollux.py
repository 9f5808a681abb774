"""Pollux (Qiao et al., OSDI 2021, arXiv:2008.12260): devices go where they raise goodput most, fairly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView
from lightning_egeria.cluster.search import Choices, Solution, search

RESTART_S = 30  # that a change of devices costs
_LEAST = 1e-3  # speed-up that a job without devices counts for
_SLOWEST = 1e-6  # speed-up of one with devices, at least: none waits beside free devices


class Pollux:
    """Maximises the harmonic mean of the jobs' speed-ups.

    The speed-up of a job is its goodput, relative to the goodput on its fair share of the devices. If its devices
    change, it is multiplied by ``max(age - 30 restarts, 0) / (age + 30)``, the share of its life that it would not
    spend restarting. A job gets at most twice the devices it has run on before, and a node has at most one job that
    spans several nodes.

    The goodput on the fair share is that without frozen layers. A job that freezes needs fewer devices for the same
    speed-up, and others get them.

    Args:
        rounds: of the search; more find better allocations.
    """

    name = "pollux"
    adapts_batch_size = True

    def __init__(self, rounds: int = 100) -> None:
        self._rounds = rounds

    def allocate(
        self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation], now: float
    ) -> dict[str, Allocation]:
        """See `Policy`."""
        # Who had least service chooses first where costs are equal.
        ordered = sorted(jobs, key=lambda job: (job.service, job.submitted))
        rows = self.solve(ordered, cluster, current).rows
        return {job.name: row for job, row in zip(ordered, rows, strict=True) if row}

    def solve(self, jobs: Sequence[JobView], cluster: Cluster, current: Mapping[str, Allocation]) -> Solution:
        """Return the allocation of each job, with its cost and a lower bound of any allocation's cost."""
        fair = math.ceil(cluster.devices / len(jobs))
        choices = [_choices(job, cluster, fair, tuple(sorted(current.get(job.name, ())))) for job in jobs]
        return search(cluster.nodes, choices, self._rounds)


def _choices(job: JobView, cluster: Cluster, fair: int, row: Allocation) -> Choices:
    """Return what each allocation of a job costs: the inverse of its speed-up."""
    most = max(1, min(2 * job.profiled, job.most_replicas, cluster.devices))
    on_one = min(most, max(cluster.nodes))
    # A job that has frozen layers is faster than its fair share without: others need the devices more.
    usual = job.unfrozen or job.model
    base = usual.goodput(1, min(fair, usual.limits.most_replicas)) if usual is not None else 0.0
    if job.model is None or not base:
        one = np.arange(on_one + 1) / fair
        several = np.arange(most + 1) / fair
    else:
        one, several = (values / base for values in job.model.goodputs(on_one, most))
    # One node's worth of devices at fair speed counts as one.
    scale = len(cluster.nodes) / cluster.devices
    one, several = one * scale, several * scale
    factor = max(job.age - RESTART_S * job.restarts, 0.0) / (job.age + RESTART_S)
    count = sum(devices for _, devices in row)
    kept = _costs(several if len(row) > 1 else one)
    keep = float(kept[count]) if count < len(kept) else math.inf
    costs_several = _costs(several * factor)
    costs_several[:2] = math.inf
    return Choices(_costs(one * factor).tolist(), costs_several.tolist(), row, keep)


def _costs(speed_ups: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cost of 0, 1, 2, ... devices: any number costs less than none."""
    costs = 1 / (np.maximum(speed_ups, _SLOWEST) + _LEAST)
    costs[0] = 1 / _LEAST
    return np.asarray(costs)
