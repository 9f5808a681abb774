"""Which queued jobs run on which devices: the policies of the simulator, applied to real jobs on real nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_egeria.cluster.fair import FairShare
from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, Policy, check, devices_of
from lightning_egeria.cluster.placement import on_one_node
from lightning_egeria.cluster.queues import BackFill, FirstComeFirstServed, ShortestRemaining
from lightning_egeria.cluster.tiresias import Tiresias
from lightning_egeria.errors import QueueError, TraceError
from lightning_egeria.jobs.rundirs import time_limit_in

# Pollux and hints need numpy, which most commands do without.
if TYPE_CHECKING:
    from lightning_egeria.cluster.hints import Hints

LIVE = ("backfill", "fair", "fcfs", "pollux", "srtf", "tiresias")  # need no true speed
DEFAULT = "backfill"
INTERVAL_S = 60.0
Place = tuple[str, int]  # name of a node, devices on it


def policy_named(name: str) -> Policy:
    """Return a new policy.

    Raises:
        QueueError: the queue has none of this name.
    """
    if name == "optimus":
        raise QueueError(
            "policy: optimus needs the speed of each job on every number of devices, which only a simulation knows. "
            f"Expected one of {', '.join(LIVE)}"
        )
    if name not in LIVE:
        raise QueueError(f"policy: expected one of {', '.join(LIVE)}, got {name!r}")
    if name == "pollux":
        from lightning_egeria.cluster.pollux import Pollux

        return Pollux()
    policies: dict[str, Callable[[], Policy]] = {
        "backfill": BackFill,
        "fair": FairShare,
        "fcfs": FirstComeFirstServed,
        "srtf": ShortestRemaining,
        "tiresias": Tiresias,
    }
    return policies[name]()


@dataclasses.dataclass(frozen=True)
class QueueEntry:
    """What the scheduler sees of a job that may run.

    Attributes:
        id: of the job; a higher one came later.
        submitted: in seconds.
        devices: how many it asks for.
        most_devices: how many it can use, from 1 on; None if it runs on ``devices`` only.
        priority: higher goes first.
        place: node and devices that it has now; None if it waits.
        service: device-seconds so far.
        starts: how often it has started.
        hints: file in which it describes itself.
        run: its run directory, which has the longest time of an attempt.
    """

    id: int
    submitted: float
    devices: int
    most_devices: int | None = None
    priority: int = 0
    place: Place | None = None
    service: float = 0.0
    starts: int = 0
    hints: Path | None = None
    run: Path | None = None

    def view(self, now: float, largest: int) -> JobView:
        """Return the job as a policy sees it.

        Args:
            now: seconds.
            largest: devices of the largest node.
        """
        known = _hints(self.hints)
        return JobView(
            name=str(self.id),
            submitted=self.submitted,
            age=max(now - self.submitted, 0.0),
            gang=self.devices,
            most_replicas=min(self.most_devices or self.devices, largest),
            profiled=max(known.profiled if known is not None else 0, min(self.starts, 1)),
            service=self.service,
            restarts=max(self.starts - 1, 0),
            model=known.goodput() if known is not None else None,
            unfrozen=known.unfrozen_goodput() if known is not None else None,
            seconds_left=lambda: self._seconds_left(known),
        )

    def _seconds_left(self, known: Hints | None) -> float:
        """Return the time that the job reports; else its time limit less its running time; else infinity."""
        if known is not None and known.seconds_left is not None:
            return known.seconds_left
        limit = time_limit_in(self.run) if self.run is not None else None
        return math.inf if limit is None else max(limit - self.service / self.devices, 0.0)


class Scheduler:
    """Applies a policy to jobs. It decides when jobs arrive, end or lose their node, and at intervals.

    Args:
        policy: decides; it must be new.
        interval_s: seconds between two decisions without a reason.
    """

    def __init__(self, policy: Policy, interval_s: float = INTERVAL_S) -> None:
        self.policy = policy
        self._interval_s = interval_s
        self._decided: dict[int, Place] | None = None
        self._known: tuple[set[int], dict[str, int]] = (set(), {})
        self._due = 0.0
        self._passed: dict[int, set[int]] = {}  # by a job that runs in a gap: those that it has passed over
        self._fillers: set[int] = set()

    def refuses(self, entry: QueueEntry, nodes: Mapping[str, int]) -> str | None:
        """Return why a job can never run here; None if it can."""
        largest = max(nodes.values())
        if entry.devices > largest:
            return f"needs {entry.devices} devices, and the largest machine here has {largest}"
        if self.policy.adapts_batch_size and entry.devices > 1 and entry.most_devices is None:
            return (
                f"under {self.policy.name} the number of devices of a job changes. Set resources.most_devices, or use "
                f"another policy"
            )
        return None

    def decide(self, entries: Sequence[QueueEntry], nodes: Mapping[str, int], now: float) -> dict[int, Place]:
        """Return where each job shall run, and on how many devices; the others wait.

        Args:
            entries: jobs that may run; `refuses` none of them.
            nodes: devices of each node, by its name.
            now: seconds.
        """
        known = {entry.id for entry in entries}, dict(nodes)
        if self._decided is not None and known == self._known and now < self._due:
            return self._decided
        held = self._decided if self._decided is not None else {e.id: e.place for e in entries if e.place is not None}
        held = {id: place for id, place in held.items() if id in known[0] and place[1] <= nodes.get(place[0], 0)}
        self._decided = self._allocated(entries, held, nodes, now) if entries else {}
        self._known, self._due = known, now + self._interval_s
        return self._decided

    def _allocated(
        self, entries: Sequence[QueueEntry], held: Mapping[int, Place], nodes: Mapping[str, int], now: float
    ) -> dict[int, Place]:
        names = list(nodes)
        cluster = Cluster(tuple(nodes.values()))
        current: dict[str, Allocation] = {str(id): ((names.index(node), n),) for id, (node, n) in held.items()}
        ordered = self._in_order(entries, held)
        views = [entry.view(now, max(nodes.values())) for entry in ordered]
        filling = {name: current.pop(name) for name in map(str, self._fillers) if name in current}
        wanted = self.policy.allocate(views, cluster, current, now)
        check(wanted, views, cluster, self.policy.name)
        placed, fillers = on_one_node(wanted, views, cluster, current, filling, self.policy.adapts_batch_size)
        self._fillers = set(map(int, fillers))
        self._note_passed(ordered, held, placed)
        return {int(name): (names[row[0][0]], devices_of(row)) for name, row in placed.items()}

    def _in_order(self, entries: Sequence[QueueEntry], held: Mapping[int, Place]) -> list[QueueEntry]:
        """Return jobs in the order in which they get devices.

        Jobs that have devices keep them. Then the highest priority, then the earliest. Jobs that run in a gap come
        last, since they make room.
        """
        waiting = {entry.id for entry in entries} - held.keys()
        self._passed = {id: passed & waiting for id, passed in self._passed.items() if id in held and passed & waiting}
        return sorted(
            entries,
            key=lambda entry: (
                2 if entry.id in self._passed else int(entry.id not in held),
                0 if entry.id in held else -entry.priority,
                entry.id,
            ),
        )

    def _note_passed(
        self, ordered: Sequence[QueueEntry], held: Mapping[int, Place], placed: Mapping[str, Allocation]
    ) -> None:
        passed: set[int] = set()
        for entry in ordered:
            if str(entry.id) not in placed:
                passed.add(entry.id)
            elif entry.id not in held and passed:
                self._passed[entry.id] = set(passed)


def _hints(path: Path | None) -> Hints | None:
    """Return what a job says of itself; None if it says nothing that can be read."""
    try:
        if path is None or not path.exists():
            return None
        from lightning_egeria.cluster.hints import Hints

        return Hints.read(path)
    except (OSError, TraceError):
        return None
