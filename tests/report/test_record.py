"""The file that a run leaves for its pictures."""

import json
import math

import pytest

from lightning_egeria.errors import RecordError
from lightning_egeria.report.record import LONGEST, CachePoint, EvaluationPoint, MetricPoint, RunRecord, StepTimes


def times(step, depth=0, seconds=1.0, batches=1):
    return StepTimes(step, batches, depth, 0.0, seconds, 0.0, 0.0, 0.0)


def a_record():
    return RunRecord(
        "run",
        {"torch": "2"},
        ["a", "b"],
        [{"step": 3, "kind": "freeze", "depth": 1, "reason": "calm"}],
        [EvaluationPoint(2, [0.5, None], [None, None])],
        [times(1), times(2)],
        [MetricPoint(2, 1.5, {"val/acc": 0.5})],
        [CachePoint(2, 1, 2, 3, 4)],
        {"seconds_saved": 1.0},
    )


def test_what_is_written_is_read(tmp_path):
    record = a_record()
    record.write(tmp_path / "deep" / "egeria.json")
    assert RunRecord.read(tmp_path / "deep") == record
    assert RunRecord.read(tmp_path / "deep" / "egeria.json") == record
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["egeria.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "not a record of version 1"),
        (json.dumps({"version": 7}), "not a record of version 1"),
        (json.dumps({"version": 1, "name": "x"}), "is damaged"),
        (
            json.dumps({"version": 1, "name": "x", "evaluations": [], "steps": [{}], "metrics": [], "cache": []}),
            "damaged",
        ),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "egeria.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordError, match=words) as error:
        RunRecord.read(path)
    assert str(path) in str(error.value)


def test_a_long_run_stays_small_and_keeps_its_means():
    record = RunRecord("long")
    count = 10 * LONGEST
    for step in range(count):
        record.add_step(times(step, depth=step // (count // 2), seconds=step % 2))
        record.add_evaluation(EvaluationPoint(step, [], []))
    assert len(record.steps) <= LONGEST
    assert len(record.evaluations) <= LONGEST
    assert sum(entry.batches for entry in record.steps) == count
    assert record.steps[-1].step == count - 1
    for depth in (0, 1):
        mean = record.mean_times(depth)
        assert mean.batches == count // 2
        assert math.isclose(mean.seconds, 0.5)
    assert record.mean_times(2) is None
