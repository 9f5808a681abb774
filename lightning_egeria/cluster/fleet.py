"""The jobs of a live run, and which devices each shall have: policies applied to real jobs, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_egeria.cluster.hints import Hints
from lightning_egeria.cluster.job_files import JobDescription
from lightning_egeria.cluster.jobs import Allocation, Cluster, JobView, Policy, check, devices_of
from lightning_egeria.errors import JobError, TraceError

HINTS = "hints.json"


@dataclasses.dataclass
class LiveJob:
    """A job of a live run.

    Attributes:
        description: as its user wrote it.
        running: devices that its process has now; 0 without a process.
        service: device-seconds so far.
        starts: how often its process has started.
        state: ``"waiting"``, ``"running"``, ``"done"`` or ``"failed"``.
    """

    description: JobDescription
    running: int = 0
    service: float = 0.0
    starts: int = 0
    state: str = "waiting"

    @property
    def has_ended(self) -> bool:
        """Whether it is done or failed."""
        return self.state in ("done", "failed")


class Fleet:
    """Applies a policy to live jobs.

    Args:
        jobs: their descriptions.
        cluster: the devices.
        policy: decides; it must be new.
        folder: the jobs' folders are in it. A job may write its hints there.
        interval_s: seconds between two decisions; arrivals and ends are decided upon at once.
        clock: seconds since the start of the run.

    Attributes:
        jobs: by name, in the order of arrival.

    Raises:
        JobError: a job asks for more devices than a node has.
    """

    def __init__(
        self,
        jobs: Sequence[JobDescription],
        cluster: Cluster,
        policy: Policy,
        folder: Path,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        largest = max(cluster.nodes)
        for job in jobs:
            if job.devices > largest:
                raise JobError(f"job {job.name!r} asks for {job.devices} devices, the largest node has {largest}")
        self.jobs = {job.name: LiveJob(job) for job in sorted(jobs, key=lambda one: one.arrives_s)}
        self._cluster, self._policy, self._folder = cluster, policy, folder
        self._interval_s, self._clock = interval_s, clock
        self._decided: dict[str, Allocation] = {}
        self._due = 0.0
        self._known: set[str] = set()

    @property
    def active(self) -> list[LiveJob]:
        """Jobs that have arrived and not ended."""
        now = self._clock()
        return [job for job in self.jobs.values() if job.description.arrives_s <= now and not job.has_ended]

    @property
    def next_arrival_s(self) -> float | None:
        """Seconds until the next job arrives; None if all have arrived."""
        left = [job.description.arrives_s - self._clock() for job in self.jobs.values() if not job.has_ended]
        return min((seconds for seconds in left if seconds > 0), default=None)

    def allocation(self, name: str) -> Allocation:
        """Return the devices that a job shall have now: on one node; empty if it shall wait."""
        active, now = self.active, self._clock()
        names = {job.description.name for job in active}
        if active and (now >= self._due or names != self._known):
            views = [self._view(job, now) for job in active]
            current = {name: row for name, row in self._decided.items() if name in names}
            decided = self._policy.allocate(views, self._cluster, current, now)
            check(decided, views, self._cluster, self._policy.name)
            self._decided, self._known, self._due = decided, names, now + self._interval_s
        row = self._decided.get(name, ()) if name in names else ()
        # A job runs on one node. What it was given on others stays free until the next decision.
        return (max(row, key=lambda part: part[1]),) if row else ()

    def devices(self, name: str) -> int:
        """Return how many devices a job shall have now; 0 if it shall wait."""
        return devices_of(self.allocation(name))

    def started(self, name: str, devices: int) -> None:
        """The process of a job has started."""
        job = self.jobs[name]
        job.running, job.state = devices, "running"
        job.starts += 1

    def ran(self, name: str, seconds: float) -> None:
        """The process of a job ran for some more seconds."""
        job = self.jobs[name]
        job.service += seconds * job.running

    def stopped(self, name: str, state: str) -> None:
        """The process of a job has ended: it waits for devices, is done or has failed."""
        job = self.jobs[name]
        job.running, job.state = 0, state

    def hints(self, name: str) -> Hints | None:
        """Return what a job says of itself; None if it says nothing that can be read."""
        try:
            return Hints.read(self._folder / name / HINTS)
        except TraceError:
            return None

    def _view(self, job: LiveJob, now: float) -> JobView:
        described, hints = job.description, self.hints(job.description.name)
        most = min(described.most, max(self._cluster.nodes))
        return JobView(
            name=described.name,
            submitted=described.arrives_s,
            age=now - described.arrives_s,
            gang=described.devices,
            most_replicas=most,
            profiled=max(hints.profiled if hints is not None else 0, min(job.starts, 1)),
            service=job.service,
            restarts=max(job.starts - 1, 0),
            model=hints.goodput() if hints is not None else None,
            unfrozen=hints.unfrozen_goodput() if hints is not None else None,
        )
