"""Finds an allocation of least total cost, where each job has a cost for each number of devices.

Each job chooses nothing, devices on one node, devices on several nodes, or exactly what it has. A node never holds more
than one job that spans several nodes. Without the nodes this is a multiple-choice knapsack: the steps along the lower
convex hull of each job's costs, best ratio first, solve it but for one job, and bound the cost from below. The packing
into nodes, and what the hull leaves out, are improved by releasing a few jobs at a time and choosing for them again.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Iterable, Sequence
from operator import itemgetter

Row = tuple[tuple[int, int], ...]  # (node, devices), sorted by node
Hull = list[tuple[int, float]]  # (devices, cost)
_NEAR_ENOUGH = 1e-3  # of the bound
_OTHERS = (1, 1, 2, 3)  # jobs that are released with one
_GREEDY = 0.5  # of the rounds let one job after the other take its best
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Choices:
    """What one job costs.

    Attributes:
        on_one: cost of 0, 1, 2, ... devices on one node.
        on_several: cost of 0, 1, 2, ... devices on several nodes; infinite for 0 and 1.
        row: the devices it has.
        keep: the cost of having these.
    """

    on_one: Sequence[float]
    on_several: Sequence[float]
    row: Row
    keep: float

    @property
    def most(self) -> int:
        """Most devices that any choice has."""
        return max(len(self.on_one), len(self.on_several)) - 1

    def cost(self, row: Row) -> float:
        """Return the cost of a row; infinite for one that the job cannot use."""
        if row == self.row:
            return self.keep
        count = sum(devices for _, devices in row)
        return _at(self.on_several if len(row) > 1 else self.on_one, count)


@dataclasses.dataclass(frozen=True)
class Solution:
    """What the search has found.

    Attributes:
        rows: devices of each job.
        cost: of all jobs.
        bound: no allocation costs less.
    """

    rows: list[Row]
    cost: float
    bound: float


def search(nodes: Sequence[int], choices: Sequence[Choices], rounds: int = 100, seed: int = 0) -> Solution:
    """Return an allocation of low cost; the same for the same arguments.

    Args:
        nodes: devices of each node.
        choices: of each job. Their rows fit on the nodes together.
        rounds: how many groups of jobs are chosen for again.
        seed: which.
    """
    hulls = [_hull(job) for job in choices]
    everybody = range(len(choices))
    counts, bound = _relaxed(hulls, everybody, sum(nodes))
    wanted = [min(cost for count, cost in hull if count <= counts[index]) for index, hull in enumerate(hulls)]
    kept = _Packing(nodes, len(choices))
    for index, job in enumerate(choices):
        kept.put(index, job.row)
    fresh = _Packing(nodes, len(choices))
    _pack(fresh, choices, everybody, counts)
    for packing in (kept, fresh):
        _fill(packing, choices, everybody)
    best = min((kept, fresh), key=lambda packing: _total(packing, choices))
    cost = _total(best, choices)
    chosen = random.Random(seed)
    tries = [1] * len(choices)
    for _ in range(rounds if len(choices) > 1 else 0):
        if cost <= bound * (1 + _NEAR_ENOUGH):
            break
        # Who is furthest from what the bound has for it, and a few others.
        first = max(everybody, key=lambda index: (choices[index].cost(best.rows[index]) - wanted[index]) / tries[index])
        tries[first] += 1
        group = {first, *chosen.sample(everybody, min(len(everybody), chosen.choice(_OTHERS)))}
        order = chosen.sample(sorted(group), len(group))
        change = _choose_again(best, choices, order, None if chosen.random() < _GREEDY else hulls)
        cost += change
        if change:
            tries[first] = 1
    return Solution(best.rows, _total(best, choices), bound)


def _choose_again(
    packing: _Packing, choices: Sequence[Choices], group: Sequence[int], hulls: Sequence[Hull] | None
) -> float:
    """Release these jobs and choose for them again; return the change of cost. What is no better is undone.

    Without hulls, each job in turn takes what is best for it.
    """
    before = [packing.take(index) for index in group]
    if hulls is None:
        for index in group:
            _take_best(packing, choices[index], index)
    else:
        counts, _ = _relaxed(hulls, group, packing.left)
        _pack(packing, choices, group, counts)
    _fill(packing, choices, group)
    change = math.fsum(
        choices[index].cost(packing.rows[index]) - choices[index].cost(row)
        for index, row in zip(group, before, strict=True)
    )
    if change < -_ROUNDING:
        return change
    for index in group:
        packing.take(index)
    for index, row in zip(group, before, strict=True):
        packing.put(index, row)
    return 0.0


def _total(packing: _Packing, choices: Sequence[Choices]) -> float:
    return math.fsum(job.cost(row) for job, row in zip(choices, packing.rows, strict=True))


def _hull(job: Choices) -> Hull:
    """Return the lower convex hull of the least cost by number of devices, as far as it falls."""
    kept = sum(devices for _, devices in job.row)
    hull: Hull = []
    for count in range(job.most + 1):
        cost = min(
            job.on_one[count] if count < len(job.on_one) else math.inf,
            job.on_several[count] if count < len(job.on_several) else math.inf,
            job.keep if count == kept else math.inf,
        )
        if hull and cost >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (first, high), (second, low) = hull[-2:]
            if (high - low) * (count - second) > (low - cost) * (second - first):
                break
            hull.pop()
        hull.append((count, cost))
    return hull


def _relaxed(hulls: Sequence[Hull], group: Iterable[int], left: int) -> tuple[dict[int, int], float]:
    """Return devices of each job without regard to nodes, and the least cost that any choice can have."""
    counts: dict[int, int] = {}
    heap: list[tuple[float, int, int]] = []
    cost = 0.0

    def push(index: int, position: int) -> None:
        (count, high), (more, low) = hulls[index][position : position + 2]
        heapq.heappush(heap, ((low - high) / (more - count), index, position))

    for index in group:
        counts[index] = 0
        cost += hulls[index][0][1]
        if len(hulls[index]) > 1:
            push(index, 0)
    while heap and left > 0:
        slope, index, position = heapq.heappop(heap)
        more, _ = hulls[index][position + 1]
        step = more - counts[index]
        if step > left:  # the bound takes the fraction that fits; the counts leave the rest to be filled
            return counts, cost + slope * left
        counts[index], left = more, left - step
        cost += slope * step
        if position + 2 < len(hulls[index]):
            push(index, position + 1)
    return counts, cost


def _pack(packing: _Packing, choices: Sequence[Choices], group: Iterable[int], counts: dict[int, int]) -> None:
    """Give each job about the number of devices it shall have: unchanged rows first, then the largest."""
    waiting = []
    for index in group:
        job, count = choices[index], counts[index]
        same = count and count == sum(devices for _, devices in job.row)
        if same and job.keep <= min(_at(job.on_one, count), _at(job.on_several, count)) and packing.fits(job.row):
            packing.put(index, job.row)
        elif count:
            waiting.append((count, index))
    for count, index in sorted(waiting, key=itemgetter(0), reverse=True):
        job = choices[index]
        spans = _at(job.on_several, count) < _at(job.on_one, count)
        row = packing.on_several(count) if spans else packing.on_one(count)
        if job.cost(row) < job.cost(()):
            packing.put(index, row)


def _fill(packing: _Packing, choices: Sequence[Choices], group: Iterable[int]) -> None:
    """Let one job after the other choose its best from what is free, the one with the highest cost first."""
    group = list(group)
    changed = True
    while changed and packing.left:
        changed = False
        for index in sorted(group, key=lambda index: -choices[index].cost(packing.rows[index])):
            changed |= _take_best(packing, choices[index], index)


def _take_best(packing: _Packing, job: Choices, index: int) -> bool:
    """Let a job choose its best from what it has and what is free; return whether it changed anything."""
    before = packing.take(index)
    best, cost = before, job.cost(before)
    one = _best(job.on_one, packing.most_on_one)
    several = _best(job.on_several, packing.most_on_several)
    for row in (packing.on_one(one), packing.on_several(several)):
        if job.cost(row) < cost - _ROUNDING:
            best, cost = row, job.cost(row)
    if job.keep < cost - _ROUNDING and packing.fits(job.row):
        best = job.row
    packing.put(index, best)
    return best != before


def _at(costs: Sequence[float], count: int) -> float:
    return costs[count] if count < len(costs) else math.inf


def _best(costs: Sequence[float], most: int) -> int:
    """Return the number of devices that costs least, of at most ``most``; the smaller of two equals."""
    return min(range(min(most + 1, len(costs))), key=costs.__getitem__)


class _Packing:
    """Which job holds what on which node. Nodes with as many free devices are found without a search."""

    def __init__(self, nodes: Sequence[int], jobs: int) -> None:
        self.rows: list[Row] = [()] * jobs
        self.left = sum(nodes)
        self._free = list(nodes)
        self._spanned = [False] * len(nodes)  # by a job on several nodes
        largest = max(nodes)
        # [spanned][free devices] -> nodes. A dictionary keeps their order.
        self._by_free: list[list[dict[int, None]]] = [[{} for _ in range(largest + 1)] for _ in range(2)]
        for node, devices in enumerate(nodes):
            self._by_free[0][devices][node] = None

    @property
    def most_on_one(self) -> int:
        """Free devices of the emptiest node."""
        for free in range(len(self._by_free[0]) - 1, 0, -1):
            if self._by_free[0][free] or self._by_free[1][free]:
                return free
        return 0

    @property
    def most_on_several(self) -> int:
        """Free devices of all nodes that a job on several nodes may use."""
        return sum(free * len(nodes) for free, nodes in enumerate(self._by_free[0]))

    def fits(self, row: Row) -> bool:
        """Whether exactly these devices are free."""
        return all(self._free[node] >= count and not (len(row) > 1 and self._spanned[node]) for node, count in row)

    def on_one(self, count: int) -> Row:
        """Return a row on the fullest node with this many free devices; nothing if there is none."""
        for free in range(max(count, 1), len(self._by_free[0])):
            for spanned in (1, 0):
                for node in self._by_free[spanned][free]:
                    return ((node, count),) if count else ()
        return ()

    def on_several(self, count: int) -> Row:
        """Return a row of this many devices, or of all if there are fewer, on as few nodes as possible."""
        row: list[tuple[int, int]] = []
        pools = [iter(nodes) for nodes in self._by_free[0]]
        sizes = [len(nodes) for nodes in self._by_free[0]]
        while count > 0:
            large_enough = (free for free in range(count, len(sizes)) if sizes[free])
            largest = (free for free in range(min(count, len(sizes)) - 1, 0, -1) if sizes[free])
            free = next(large_enough, None) or next(largest, None)
            if free is None:
                break
            sizes[free] -= 1
            row.append((next(pools[free]), min(free, count)))
            count -= free
        return tuple(sorted(row))

    def put(self, index: int, row: Row) -> None:
        """Give a job, which has nothing, these devices."""
        self._move(row, -1, spans=len(row) > 1)
        self.rows[index] = row

    def take(self, index: int) -> Row:
        """Take all devices of a job, and return which they were."""
        row, self.rows[index] = self.rows[index], ()
        self._move(row, 1, spans=False if len(row) > 1 else None)
        return row

    def _move(self, row: Row, sign: int, spans: bool | None) -> None:
        for node, count in row:
            del self._by_free[self._spanned[node]][self._free[node]][node]
            self._free[node] += sign * count
            self.left += sign * count
            if spans is not None and len(row) > 1:
                self._spanned[node] = spans
            self._by_free[self._spanned[node]][self._free[node]][node] = None
