"""Traces: exact at measured points, linear between them, refused beyond them."""

import numpy as np
import pytest
from clusters import example, needs_published, published_traces

from lightning_egeria.cluster.example import APPLICATIONS, write_example
from lightning_egeria.cluster.traces import Application, Limits, read_applications
from lightning_egeria.errors import TraceError


@pytest.fixture
def vision():
    return example()[1]["vision"]


@pytest.fixture
def folder(tmp_path):
    write_example(tmp_path)
    return tmp_path / "traces" / "vision"


def test_a_measured_placement_has_its_times(vision):
    model, _ = APPLICATIONS["vision"]
    for placement in ((1,), (4,), (1, 3), (2, 4, 4, 4)):
        step, sync = vision.step_times(placement, 64)
        assert step == pytest.approx(model.step_seconds(len(placement), sum(placement), 64), abs=1e-6)
        assert step - sync == pytest.approx(model.gradient_seconds(64), abs=2e-6)


def test_rotations_of_a_placement_are_the_same(vision):
    assert vision.step_times((3, 1), 48) == vision.step_times((1, 3), 48)


def test_between_local_batch_sizes_times_are_linear(vision):
    low, middle, high = (np.array(vision.step_times((2,), size)) for size in (32, 40, 64))
    np.testing.assert_allclose(middle, 0.75 * low + 0.25 * high)


def test_a_placement_that_was_not_measured_lies_between(vision):
    model, _ = APPLICATIONS["vision"]
    step, _ = vision.step_times((4,) * 10, 64)
    assert step == pytest.approx(model.step_seconds(10, 40, 64), rel=0.02)


def test_between_batch_sizes_gradients_and_steps_are_linear(vision):
    assert vision.gradient(64, 3) == (1.0, 24.0)
    assert vision.iterations(96, 3) == (vision.iterations(64, 3) + vision.iterations(128, 3)) / 2


@pytest.mark.parametrize(
    "ask", [lambda a: a.step_times((1,), 200), lambda a: a.gradient(32, 0)], ids=["local", "total"]
)
def test_beyond_the_traces_is_an_error(vision, ask):
    with pytest.raises(TraceError, match="vision"):
        ask(vision)


def test_epochs_and_local_sizes_can_be_limited(folder):
    application = Application.read(folder, Limits(epochs=3, largest_local=64))
    assert (application.epochs, application.largest_local) == (3, 64)
    with pytest.raises(TraceError, match=r"12 epochs .* expected 13"):
        Application.read(folder, Limits(epochs=13))


def test_a_missing_application_is_named(folder):
    with pytest.raises(TraceError, match="no traces of speech"):
        read_applications(folder.parent, ["vision", "speech"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("placements.csv", None, "cannot be read"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n", "has no lines"),
        ("scalability.csv", "num_nodes,num_replicas\n1,2\n", "needs numbers"),
        ("validation-64.csv", "progress,iteration,metric,grad_sqr,grad_var\n1,1,1,1,x\n", "needs numbers"),
        ("validation-64.csv", "progress,iteration,metric,grad_sqr,grad_var\n1,1,1,1,inf\n", "needs finite numbers"),
        ("validation-best.csv", "progress\n1\n", "no batch size"),
    ],
    ids=["missing", "empty", "columns", "text", "infinite", "name"],
)
def test_a_damaged_file_is_named(folder, name, text, message):
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(TraceError, match=message):
        Application.read(folder)


def test_an_application_needs_a_validation_run(folder):
    for path in folder.glob("validation-*"):
        path.unlink()
    with pytest.raises(TraceError, match="no validation"):
        Application.read(folder)


@needs_published
def test_limits_of_the_published_applications():
    limits = {
        name: (a.initial_batch_size, a.largest_batch_size, a.smallest_local, a.largest_local, a.epochs)
        for name, a in published_traces().items()
    }
    assert limits["cifar10"] == (128, 4096, 32, 1024, 100)
    assert limits["yolov3"] == (8, 512, 4, 8, 50)
    assert limits["bert"] == (12, 384, 4, 12, 2)
