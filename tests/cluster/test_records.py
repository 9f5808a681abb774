"""The log of a simulation: read as it was written, and its figures."""

import json

import pytest

from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.records import Interval, JobState, Record
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.tiresias import Tiresias
from lightning_egeria.cluster.workloads import Submission
from lightning_egeria.errors import TraceError
from support.cluster import example


def test_a_log_is_read_as_written(tmp_path):
    workload, applications = example(jobs=5)
    record = simulate(workload, applications, Cluster.of(4, 4), Tiresias())
    record.write(tmp_path / "log.jsonl")
    assert Record.read(tmp_path / "log.jsonl") == record
    first, *lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert first["policy"] == "tiresias"
    assert [line["time"] for line in lines] == [interval.time for interval in record.intervals]


def test_figures_of_two_jobs_by_hand():
    record = Record("policy", (2,), 10, {"a": 0, "b": 5})
    both = {"a": JobState(((0, 1),), 0, 0.0, 1, 0), "b": JobState(((0, 1),), 0, 0.0, 1, 0)}
    record.intervals = [Interval(10, both, {}), Interval(20, {"b": both["b"]}, {"a": 15}), Interval(30, {}, {"b": 25})]
    assert record.completion_times == {"a": 15, "b": 20}
    assert record.average_completion_s == 17.5
    assert record.makespan_s == 25
    assert record.utilisation == (5 + 10 + 5) / (2 * 25)


@pytest.mark.parametrize("interval_s", [60, 600])
def test_a_job_uses_its_devices_to_its_end_only(interval_s):
    _, applications = example()
    workload = [Submission("a", interval_s, "vision", 1, 64)]
    record = simulate(workload, applications, Cluster.of(1, 1), Tiresias(), interval_s)
    assert record.utilisation == 1


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]\n",
        '{"policy": "x"}\n',
        "{",
        '{"policy":"x","nodes":[1],"interval_s":1,"submitted":{}}\n{"time":1}\n',
        "[" * 100_000,
        '{"policy":"x","nodes":[1' + "0" * 400 + '],"interval_s":1,"submitted":{}}\n',
        '{"policy":"x","nodes":"12","interval_s":1,"submitted":{}}\n',
        '{"policy":"x","nodes":[1],"interval_s":"1","submitted":{}}\n',
        '{"policy":"x","nodes":[1],"interval_s":1,"submitted":{"a":"b"}}\n',
        '{"policy":"x","nodes":[1],"interval_s":1,"submitted":{},"intervals":3}\n',
        '{"policy":"x","nodes":[1],"interval_s":1,"submitted":{}}\n{"time":NaN,"jobs":{},"completed":{}}\n',
    ],
)
def test_a_damaged_log_is_refused(tmp_path, text):
    path = tmp_path / "log.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match="not a log of a simulation"):
        Record.read(path)
