"""Freezing in the simulator: jobs end sooner, and a policy that knows takes devices from them."""

import dataclasses
import json

import pytest

from lightning_egeria.cluster.freezing_runs import FreezingRun
from lightning_egeria.cluster.goodput import BatchLimits, Goodput
from lightning_egeria.cluster.jobs import Cluster, devices_of
from lightning_egeria.cluster.pollux import Pollux
from lightning_egeria.cluster.simulated import RESTART_S, SimulatedJob
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.cluster.tiresias import Tiresias
from lightning_egeria.cluster.workloads import Submission
from lightning_egeria.errors import TraceError
from support.cluster import example, view
from support.leftovers import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "proof" / "results" / "cifar10_resnet20" / "medium"
HALF = FreezingRun((0.0,), (0.5,))


def test_a_measured_run_is_read():
    run = FreezingRun.read(RESULTS / "freezing-0.json", RESULTS / "costs.json")
    assert len(run.progress) == len(run.shares) == 3
    assert run.share_at(0) == 1
    assert run.shares[0] == run.share_at(run.progress[0]) == run.share_at(run.progress[1] - 1e-9)
    # In between it unfroze, when the learning rate dropped.
    assert run.shares[1] == 1
    assert run.shares[2] < run.shares[0] < 0.5


def test_depths_that_were_not_measured_lie_between(tmp_path):
    events = [{"step": 50, "depth": 1}, {"step": 75, "depth": 2}]
    (tmp_path / "run.json").write_text(json.dumps({"steps": 100, "events": events}))
    (tmp_path / "costs.json").write_text(json.dumps({"shares": {"2": 0.4, "2 hit": 0.1}}))
    run = FreezingRun.read(tmp_path / "run.json", tmp_path / "costs.json")
    assert run == FreezingRun((0.5, 0.75), (0.7, 0.4))


def test_a_damaged_run_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(TraceError, match="not a measured freezing run"):
        FreezingRun.read(tmp_path / "run.json", RESULTS / "costs.json")


def running(freezing, tells=True):
    vision = example()[1]["vision"]
    job = SimulatedJob(Submission("job", 0, "vision", 2, 64), vision, False, freezing, tells)
    job.reallocate(((0, 2),))
    job.advance(0, RESTART_S + 10)
    return job, vision.step_times((2,), 32)


def test_only_the_gradients_are_faster():
    job, (step, sync) = running(HALF)
    assert job.progress == pytest.approx(10 / (sync + (step - sync) / 2))


def test_who_does_not_tell_looks_as_before():
    vision = example()[1]["vision"]
    seen = {}
    for tells in (True, False):
        job = SimulatedJob(Submission("job", 0, "vision", 2, 64), vision, True, HALF, tells)
        job.reallocate(((0, 2),))
        job.advance(0, 300)
        seen[tells] = job.view(300)
    assert seen[True].unfrozen == seen[False].model
    assert seen[True].model.throughput == seen[False].model.throughput.scaled(0.5)
    assert seen[False].unfrozen is None


def test_pollux_takes_devices_from_a_job_that_froze():
    throughput = ThroughputModel((0.02, 0.001), (0.02, 0.004), (0.005, 0.001), 1.5)
    limits = BatchLimits(128, 4096, 32, 1024)
    found = {}
    for share in (1.0, 0.3):
        whole = Goodput(throughput, 1.0, 100.0, limits)
        models = {"froze": dataclasses.replace(whole, throughput=throughput.scaled(share)), "trains": whole}
        jobs = [view(name, age=3600, profiled=16, model=model, unfrozen=whole) for name, model in models.items()]
        found[share] = devices_of(Pollux().allocate(jobs, Cluster.of(4, 4), {}, 3600)["froze"])
    assert found[0.3] < found[1.0]


def test_a_workload_that_freezes_ends_sooner():
    workload, applications = example(jobs=10)
    runs = [
        simulate(
            workload, applications, Cluster.of(4, 4), Tiresias(), freezing={"vision": freezing} if freezing else {}
        )
        for freezing in (None, HALF)
    ]
    assert runs[1].average_completion_s < runs[0].average_completion_s


@pytest.mark.parametrize("depth", ["[-1, -1]", "[1]", "null", '"1"', "1.5", "{}", "1" + "0" * 400])
def test_a_depth_that_is_no_number_is_refused(depth, tmp_path):
    run, costs = tmp_path / "run.json", tmp_path / "costs.json"
    run.write_text(f'{{"steps": 100, "events": [{{"step": 10, "depth": {depth}}}]}}')
    costs.write_text('{"shares": {"1": 0.9}}')
    with pytest.raises(TraceError, match="not a measured freezing run"):
        FreezingRun.read(run, costs)
