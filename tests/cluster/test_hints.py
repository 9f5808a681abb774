"""Hints of a job, written and read."""

import dataclasses
import json
import os

import pytest

from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.errors import TraceError

MODEL = ThroughputModel((0.01, 0.001), (0.02, 0.002), (0.005, 0.0005), 2.0)
HINTS = Hints(BatchLimits(32, 1024, 8, 256), 2, 120.5, 0.5, 40.0, MODEL, MODEL.scaled(2))


def test_hints_are_read_as_written(tmp_path):
    for hints in (HINTS, Hints(BatchLimits(32, 32, 32, 32), 0, 0.0), Hints(seconds_left=12.5), Hints()):
        hints.write(tmp_path / "hints.json")
        assert Hints.read(tmp_path / "hints.json") == hints
    assert [path.name for path in tmp_path.iterdir()] == ["hints.json"]


def test_hints_that_cannot_be_written_leave_no_file(tmp_path):
    (tmp_path / "hints.json").mkdir()
    with pytest.raises(OSError, match=r"hints\.json"):
        HINTS.write(tmp_path / "hints.json")
    assert [path.name for path in tmp_path.iterdir()] == ["hints.json"]


def test_goodput_follows_from_hints():
    goodput, unfrozen = HINTS.goodput(), HINTS.unfrozen_goodput()
    assert goodput.goodput(1, 2) > goodput.goodput(1, 1) > unfrozen.goodput(1, 1) > 0
    assert dataclasses.replace(HINTS, variance=None).goodput() is None
    assert dataclasses.replace(HINTS, unfrozen=None).unfrozen_goodput() is None
    assert dataclasses.replace(HINTS, limits=None).goodput() is None


def test_a_job_tells_what_it_knows(tmp_path):
    (tmp_path / "hints.json").write_text('{"version": 1, "seconds_left": 90}')
    assert Hints.read(tmp_path / "hints.json") == Hints(seconds_left=90.0)


def changed(**values):
    state = {"version": 1, **dataclasses.asdict(HINTS)}
    return json.dumps(state | values)


BAD = {
    "nothing": "",
    "a list": "[]",
    "another version": changed(version=2),
    "no version": json.dumps({"seconds_left": 1}),
    "no progress": changed(progress=None),
    "time that ran out": changed(seconds_left=-1),
    "an extra": changed(extra=1),
    "infinite noise": changed(variance=float("inf")),
    "negative noise": changed(variance=-1.0),
    "text": changed(progress="1"),
    "true": changed(profiled=True),
    "gamma": changed(throughput={"compute": [1, 1], "between": [1, 1], "within": [1, 1], "gamma": 11}),
    "three numbers": changed(throughput={"compute": [1, 1, 1], "between": [1, 1], "within": [1, 1], "gamma": 1}),
    "no batch": changed(limits={"initial": 0, "largest": 1, "smallest_local": 1, "largest_local": 1}),
    "deep": "[" * 100_000,
    "huge progress": changed(progress=0).replace('"progress": 0', '"progress": 1' + "0" * 400),
    "large progress": changed(progress=1e300),
    "huge gamma": changed(throughput={"compute": [1, 1], "between": [1, 1], "within": [1, 1], "gamma": 10**400}),
    "huge batch": changed(limits={"initial": 1, "largest": 10**400, "smallest_local": 1, "largest_local": 1}),
    "large batch": changed(limits={"initial": 1, "largest": 2**63, "smallest_local": 1, "largest_local": 1}),
    "odd limits": changed(limits={"__class__": 1}),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_no_hints_is_refused(text, tmp_path):
    path = tmp_path / "hints.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"hints\.json is not a hints file of a job"):
        Hints.read(path)


def test_missing_hints_are_refused(tmp_path):
    with pytest.raises(TraceError, match="is not a hints file"):
        Hints.read(tmp_path / "hints.json")


def test_a_pipe_does_not_hold_up_the_scheduler(tmp_path):
    os.mkfifo(tmp_path / "hints.json")
    with pytest.raises(TraceError, match="no ordinary file"):
        Hints.read(tmp_path / "hints.json")
