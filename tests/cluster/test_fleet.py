"""Policies over live jobs, with a clock that the test moves."""

import re

import pytest

from lightning_egeria.cluster.fair import FairShare
from lightning_egeria.cluster.fleet import Fleet
from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.cluster.job_files import JobDescription
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.pollux import Pollux
from lightning_egeria.cluster.status import table_of
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.cluster.tiresias import Tiresias
from lightning_egeria.errors import JobError

LIMITS = BatchLimits(32, 1024, 8, 256)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def fleet_of(folder, policy, *jobs, nodes=(2,)):
    clock = Clock()
    descriptions = [
        JobDescription(["true"], devices, most, arrives, name=name) for name, arrives, devices, most in jobs
    ]
    return Fleet(descriptions, Cluster(nodes), policy, folder, 60.0, clock), clock


def test_arrivals_and_ends_are_decided_at_once(tmp_path):
    fleet, clock = fleet_of(tmp_path, FairShare(), ("late", 10, 1, 2), ("early", 0, 1, 2))
    assert list(fleet.jobs) == ["early", "late"]
    assert (fleet.devices("early"), fleet.devices("late")) == (2, 0)
    assert fleet.next_arrival_s == 10
    fleet.started("early", 2)
    clock.now = 10
    assert (fleet.devices("early"), fleet.devices("late")) == (1, 1)
    assert fleet.next_arrival_s is None
    fleet.stopped("early", "done")
    assert (fleet.devices("early"), fleet.devices("late")) == (0, 2)
    fleet.stopped("late", "failed")
    assert fleet.active == []
    assert fleet.devices("late") == 0


def test_service_counts_for_tiresias(tmp_path):
    fleet, clock = fleet_of(tmp_path, Tiresias(), ("old", 0, 2, 2), ("new", 100, 2, 2))
    assert fleet.devices("old") == 2
    fleet.started("old", 2)
    fleet.ran("old", 8 * 3600.0)
    assert fleet.jobs["old"].service == 16 * 3600
    clock.now = 100
    assert (fleet.devices("old"), fleet.devices("new")) == (0, 2)


def test_hints_decide_for_pollux(tmp_path):
    fleet, clock = fleet_of(tmp_path, Pollux(), ("scales", 0, 1, 8), ("stalls", 0, 1, 8), nodes=(8,))
    fast = ThroughputModel((0.01, 0.01), (1e-4, 1e-5), (1e-4, 1e-5), 1.0)
    slow = ThroughputModel((0.01, 0.01), (9.0, 9.0), (9.0, 9.0), 1.0)
    for name, model in (("scales", fast), ("stalls", slow)):
        (tmp_path / name).mkdir()
        Hints(LIMITS, 4, 100.0, 0.01, 100.0, model).write(tmp_path / name / "hints.json")
        fleet.started(name, 4)
    clock.now = 10_000
    assert fleet.devices("scales") > fleet.devices("stalls") == 1
    (tmp_path / "scales" / "hints.json").write_text("{")
    assert fleet.hints("scales") is None
    clock.now = 20_000
    assert fleet.devices("scales") + fleet.devices("stalls") <= 8  # without hints it is still served


def test_a_job_runs_on_one_node(tmp_path):
    fleet, _ = fleet_of(tmp_path, FairShare(), ("wide", 0, 1, 8), nodes=(2, 4))
    ((node, devices),) = fleet.allocation("wide")
    assert (node, devices) == (1, 4)


def test_a_gang_larger_than_a_node_is_refused(tmp_path):
    with pytest.raises(JobError, match="job 'wide' asks for 3 devices, the largest node has 2"):
        fleet_of(tmp_path, FairShare(), ("wide", 0, 3, 3), nodes=(2, 2))


@pytest.mark.parametrize("policy", [FairShare, Pollux, Tiresias])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("progress", "1" + "0" * 400),
        ("variance", "1" + "0" * 400),
        ("squared_norm", "1e308"),
        ("largest", "1" + "0" * 400),
        ("largest", "9223372036854775807"),
        ("largest", "2147483647"),
        ("initial", "2147483647"),
        ("gamma", "1" + "0" * 400),
        ("profiled", "1" + "0" * 400),
        ("compute", "[0, 0]"),
        ("between", "[1e300, 1e300]"),
        ("fewest_batches", "1048577"),
        ("limits", '{"initial": 1, "largest": 1, "smallest_local": 1, "largest_local": 1}'),
    ],
)
def test_hints_of_one_job_stop_no_other(policy, key, value, tmp_path):
    fleet, _ = fleet_of(tmp_path, policy(), ("hostile", 0, 1, 2), ("other", 0, 1, 2))
    model = ThroughputModel((0.01, 0.001), (0.02, 0.002), (0.005, 0.0005), 2.0)
    (tmp_path / "hostile").mkdir()
    path = tmp_path / "hostile" / "hints.json"
    Hints(LIMITS, 2, 120.5, 0.5, 40.0, model).write(path)
    text, count = re.subn(rf'"{key}": (\[[^\]]*\]|{{[^}}]*}}|[^,}}]+)', f'"{key}": {value}', path.read_text())
    assert count
    path.write_text(text)
    assert fleet.devices("other") > 0
    table_of(fleet)


def test_hints_are_no_link(tmp_path):
    fleet, _ = fleet_of(tmp_path, FairShare(), ("a", 0, 1, 2))
    (tmp_path / "a").mkdir()
    Hints(LIMITS, 2, 120.5).write(tmp_path / "mine.json")
    (tmp_path / "a" / "hints.json").symlink_to(tmp_path / "mine.json")
    assert fleet.hints("a") is None
