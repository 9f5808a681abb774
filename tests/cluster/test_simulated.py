"""A simulated job: progress, restarts, epochs and service to the second."""

import pytest

from lightning_egeria.cluster.simulated import RESTART_S, SimulatedJob
from lightning_egeria.cluster.workloads import Submission
from support.cluster import example


@pytest.fixture
def vision():
    return example()[1]["vision"]


def job(application, gang=1, batch_size=64, adapts=False):
    return SimulatedJob(Submission("job", 0, application.name, gang, batch_size), application, adapts)


def test_a_job_without_devices_waits(vision):
    waiting = job(vision)
    waiting.advance(0, 600)
    assert (waiting.progress, waiting.service, waiting.completed) == (0, 0, None)


def test_at_the_initial_batch_size_a_step_is_one_of_progress(vision):
    running = job(vision)
    running.reallocate(((0, 1),))
    running.advance(0, RESTART_S)
    assert (running.progress, running.service) == (0, RESTART_S)
    step, _ = vision.step_times((1,), 64)
    running.advance(RESTART_S, 10)
    assert running.progress == pytest.approx(10 / step)


def test_a_larger_batch_gains_by_the_noise(vision):
    running = job(vision, gang=2, batch_size=256)
    running.reallocate(((0, 2),))
    running.advance(0, RESTART_S + 10)
    step, _ = vision.step_times((2,), 128)
    squared_norm, variance = vision.gradient(256, 0)
    gain = (variance + squared_norm) / (variance / 4 + squared_norm)
    assert running.batch_size == 256
    assert running.progress == pytest.approx(gain * 10 / step)


def test_a_job_ends_with_its_last_epoch(vision):
    running = job(vision)
    running.reallocate(((0, 1),))
    now = 0
    while running.completed is None:
        running.advance(now, 60)
        now += 60
        assert now < 1e5
    step, _ = vision.step_times((1,), 64)
    assert running.epoch == vision.epochs
    # Each epoch's end is rounded to a second.
    assert running.completed == pytest.approx(RESTART_S + step * vision.progress_at(vision.epochs), abs=vision.epochs)
    assert running.service == running.completed


def test_only_a_second_start_is_a_restart(vision):
    running = job(vision)
    running.reallocate(((0, 1),))
    assert running.restarts == 0
    running.reallocate(())
    running.advance(0, 60)
    assert (running.restarts, running.batch_size, running.progress) == (0, 0, 0)
    running.reallocate(((1, 1),))
    assert running.restarts == 1


def test_a_job_that_adapts_learns_its_speed(vision):
    running = job(vision, adapts=True)
    assert running.view(0).model is None
    running.reallocate(((0, 2),))
    assert running.batch_size == 64
    running.advance(0, 300)
    seen = running.view(300)
    assert seen.profiled == 2
    assert running.batch_size > 64
    step, _ = vision.step_times((2,), 32)
    assert seen.model.throughput.step_seconds(1, 2, 32) == pytest.approx(step, rel=0.05)


def test_a_user_who_tunes_sets_the_most_replicas(vision):
    assert job(vision, batch_size=128).view(0).most_replicas == 8
    assert job(vision, batch_size=128, adapts=True).view(0).most_replicas == 64


def test_an_oracle_knows_what_is_left(vision):
    running = job(vision, gang=2, batch_size=128)
    assert running.steps_left == vision.iterations(128, vision.epochs - 1) - vision.iterations(128, 0)
    step, _ = vision.step_times((2, 4), 22)
    assert running.step_seconds(6) == pytest.approx(step)
