"""Runs a workload under a policy, interval by interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_egeria.cluster.freezing_runs import FreezingRun
from lightning_egeria.cluster.jobs import Allocation, Cluster, Policy, check
from lightning_egeria.cluster.records import Interval, JobState, Record
from lightning_egeria.cluster.simulated import SimulatedJob
from lightning_egeria.cluster.traces import Application
from lightning_egeria.cluster.workloads import Submission
from lightning_egeria.errors import ArgumentError, SchedulingError


def simulate(
    workload: Sequence[Submission],
    applications: Mapping[str, Application],
    cluster: Cluster,
    policy: Policy,
    interval_s: float = 60,
    freezing: Mapping[str, FreezingRun] | None = None,
    reclaim: bool = True,
) -> Record:
    """Run a workload until its last job has ended.

    Every interval, all jobs advance. Then the policy decides which devices each has from now on. A job whose devices
    change stops for 30 seconds. Intervals without jobs are left out.

    Args:
        workload: the jobs.
        applications: whose traces they follow, by name.
        cluster: the devices.
        policy: decides. It must be new: some remember jobs.
        interval_s: seconds between two decisions.
        freezing: how jobs freeze layers, by application. Jobs of others do not.
        reclaim: tell the policy that these need less time, so that it can take devices from them.

    Raises:
        ArgumentError: ``interval_s`` is less than 1, or not finite.
        SchedulingError: the policy gave away what the cluster does not have, or lets jobs wait on an idle cluster.
        TraceError: a job does what the traces do not cover.
    """
    if not 1 <= interval_s < math.inf:
        raise ArgumentError(f"interval_s must be at least 1 and finite, got {interval_s}")
    ordered = sorted(workload, key=lambda submission: submission.time)
    jobs = {
        submission.name: SimulatedJob(
            submission,
            applications[submission.application],
            policy.adapts_batch_size,
            (freezing or {}).get(submission.application),
            reclaim,
        )
        for submission in ordered
    }
    record = Record(policy.name, cluster.nodes, interval_s, {name: job.submission.time for name, job in jobs.items()})
    allocations: dict[str, Allocation] = {}
    now, decision = 0.0, 0
    while jobs:
        first = next(iter(jobs.values()))  # to arrive; before, there is nothing to decide
        decision = max(decision + 1, math.ceil(first.submission.time / interval_s))
        seconds = decision * interval_s - now
        for job in jobs.values():
            job.advance(now, seconds)
        now += seconds
        completed = {name: job.completed for name, job in jobs.items() if job.completed is not None}
        jobs = {name: job for name, job in jobs.items() if name not in completed}
        active = {name: job for name, job in jobs.items() if job.submission.time <= now}
        current = {name: allocation for name, allocation in allocations.items() if name in active}
        if active:
            views = [job.view(now) for job in active.values()]
            allocations = policy.allocate(views, cluster, current, now)
            check(allocations, views, cluster, policy.name)
            if not allocations:
                raise SchedulingError(
                    f"{policy.name} leaves jobs waiting on an idle cluster of {cluster.devices} devices; "
                    f"{views[0].name} asks for {views[0].gang}. Use a larger cluster or smaller jobs"
                )
            for name, job in active.items():
                if allocations.get(name) != current.get(name):
                    job.reallocate(allocations.get(name, ()))
        states = {
            name: JobState(job.allocation, job.epoch, job.progress, job.batch_size, job.restarts)
            for name, job in active.items()
        }
        record.intervals.append(Interval(now, states, completed))
    return record
