"""What schedulers count, and scale-invariant iterations."""

import math

import pytest

from lightning_egeria.methods.goodput.progress import COUNTS, Progress


@pytest.mark.parametrize("count", COUNTS)
def test_at_the_initial_batch_size_each_step_counts_once(count):
    progress = Progress(10)
    for _ in range(3):
        progress.begin_epoch()
        assert [progress.step(samples, 1.0, count) for samples in (10, 10, 5)] == [1, 1, 1]
    assert progress.iterations == 9.0


@pytest.mark.parametrize("sizes", [(40, 40, 15), (10, 30, 30, 25), (95,), (20, 10, 40, 20, 5)])
def test_by_epoch_an_epoch_counts_as_many_steps_as_at_first(sizes):
    progress = Progress(10)
    for _ in range(2):
        progress.begin_epoch()
        assert sum(progress.step(samples, 1.3, "epoch") for samples in sizes) == math.ceil(95 / 10)


def test_by_progress_it_counts_whole_units():
    progress = Progress(10)
    counted = [progress.step(40, 1.75, "progress") for _ in range(10)]
    assert set(counted) == {1, 2}
    assert sum(counted) == math.floor(progress.iterations) == 17


def test_by_step_it_counts_steps():
    assert [Progress(10).step(400, 7.0, "step") for _ in range(3)] == [1, 1, 1]


def test_the_state_is_all_of_it():
    progress = Progress(10)
    progress.step(40, 1.7, "epoch")
    assert Progress.from_state(progress.state()) == progress
