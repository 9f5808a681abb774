"""Traces: exact at measured points, linear between them, refused beyond them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_egeria.cluster.example import APPLICATIONS, write_example
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.policies import POLICIES
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.traces import LONGEST_S, Application, Limits, read_applications
from lightning_egeria.cluster.workloads import Submission
from lightning_egeria.errors import TraceError
from support.cluster import example, needs_published, published_traces


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
        ("scalability.csv", "num_nodes,num_replicas\n1,2\n", "0 columns named local_bsz"),
        ("validation-64.csv", "progress,iteration,metric,grad_sqr,grad_var\n1,1,1,1,x\n", "line 2 .*: grad_var is 'x'"),
        ("validation-best.csv", "progress\n1\n", "no batch size"),
        ("validation-0.csv", "progress\n1\n", "no batch size"),
    ],
    ids=["missing", "empty", "columns", "text", "name", "no samples"],
)
def test_a_damaged_file_is_named(folder, name, text, message):
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(TraceError, match=message):
        Application.read(folder)


def lines_of(path):
    return path.read_text().splitlines()


def test_the_order_of_placements_does_not_matter(folder, vision):
    header, *rows = lines_of(folder / "placements.csv")
    turned = [f"31{row[2:]}" if row.startswith("13,") else row for row in reversed(rows)]
    (folder / "placements.csv").write_text("\n".join([header, *turned]))
    read = Application.read(folder)
    for placement in ((2,), (1, 3), (3, 1)):
        assert read.step_times(placement, 40) == vision.step_times(placement, 40)


def test_a_job_of_many_years_is_refused(folder):
    header, *rows = lines_of(folder / "placements.csv")
    (folder / "placements.csv").write_text("\n".join([header, *rows, "4444,1000,1e6,0"]))
    with pytest.raises(TraceError, match=r"vision takes up to 1.8e\+09 s"):
        Application.read(folder)


def test_too_few_placements_tell_nothing_of_others(folder):
    for name in ("placements.csv", "scalability.csv"):
        (folder / name).write_text("\n".join(lines_of(folder / name)[:2]))
    with pytest.raises(TraceError, match="too few placements"):
        Application.read(folder).step_times((2, 2), 64)


EDGES = ["-1", "0", "1", "0.5", "1.5", "64", "1e-300", "5e-324", "1e300", "99999", "nan", "inf", "x"]
NUMBERS = st.sampled_from(EDGES) | st.floats().map(str)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), policy=st.sampled_from(["fcfs", "optimus", "pollux"]))
def test_damaged_traces_are_refused_or_end(tmp_path, data, policy):
    write_example(tmp_path, jobs=1)
    folder = tmp_path / "traces" / "vision"
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    header, *rows = lines_of(path)
    first, second = data.draw(st.tuples(*[st.integers(0, len(rows) - 1)] * 2))
    fields = rows[first].split(",")
    fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(NUMBERS)
    damages = ([",".join(fields)], [rows[second]], [], rows[second:], [rows[first], ",".join(fields)])
    rows[first : first + 1] = data.draw(st.sampled_from(damages))
    path.write_text("\n".join([header, *data.draw(st.sampled_from((rows, rows[::-1])))]))
    workload = [Submission("a", 0, "vision", 2, 128), Submission("b", 30, "vision", 1, 64)]
    try:
        applications = read_applications(folder.parent, ["vision"])
        record = simulate(workload, applications, Cluster.of(2, 4), POLICIES[policy](), 600)
    except TraceError:
        return
    assert record.completion_times.keys() == {"a", "b"}
    assert all(0 < seconds < LONGEST_S for seconds in record.completion_times.values())


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
