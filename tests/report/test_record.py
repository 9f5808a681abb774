"""The file that a run leaves for its pictures."""

import json
import math
import tracemalloc

import pytest

from lightning_egeria.core.training.panels import Panel
from lightning_egeria.errors import RecordError
from lightning_egeria.freezing.savings import LayerModuleSavings, Savings
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
        Savings((LayerModuleSavings("a", 3, 0.5),), 1, 0.2, 0.1, 0.5, 1.0, 9, 0, 1, "float32", 100, 200),
        ["trainer.max_epochs=3"],
        [Panel("noise", "Noise", "It grows.", "steps", "samples", {"noise": [(1, 2.0)]})],
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
        (None, "cannot read .* as the record of a run"),
        ("{", "is damaged: Input data was truncated"),
        ('{"version": 1, "name": NaN}', "is damaged: JSON is malformed"),
        ('{"about": ' + "[" * 10**5, "is damaged: maximum recursion depth"),
        ("[]", "not a record of version 1"),
        (json.dumps({"version": 7}), "not a record of version 1"),
        (json.dumps({"version": "1", "name": "x"}), "not a record of version 1"),
        (json.dumps({"version": 1}), "is damaged: Object missing required field `name`"),
        (json.dumps({"version": 1, "name": "x", "nmae": "y"}), "is damaged: Object contains unknown field `nmae`"),
        (json.dumps({"version": 1, "name": "x", "steps": [{}]}), r"is damaged: .* - at `\$.steps\[0\]`"),
        (json.dumps({"version": 1, "name": "x", "layer_modules": [True]}), r"Expected `str`, got `bool`"),
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
        typical = record.typical_times(depth)
        assert math.isclose(typical.seconds, 0.5)
    assert record.typical_times(2) is None


def test_a_compilation_is_not_a_typical_batch():
    record = RunRecord("compiled", steps=[times(1, seconds=300.0), *(times(step) for step in range(2, 12))])
    assert record.typical_times(0).seconds == 1.0


def test_typical_times_count_batches_and_not_entries():
    record = RunRecord("joined", steps=[times(1, seconds=9.0), times(2, seconds=9.0), times(50, batches=48)])
    assert record.typical_times(0).seconds == 1.0
    assert RunRecord("one", steps=[times(1, seconds=9.0)]).typical_times(0).seconds == 9.0


def test_numbers_are_read_as_they_were_written(tmp_path):
    numbers = [0.1, 1e-300, 1 / 3, 5e-324, -2.5e299, 123456789.123456789]
    RunRecord("exact", metrics=[MetricPoint(1, 0.1 + 0.2, {str(n): x for n, x in enumerate(numbers)})]).write(
        tmp_path / "egeria.json"
    )
    (point,) = RunRecord.read(tmp_path).metrics
    assert (point.seconds, list(point.values.values())) == (0.1 + 0.2, numbers)


def test_what_json_cannot_say_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        RunRecord("broken", metrics=[MetricPoint(1, math.nan, {})]).write(tmp_path / "egeria.json")
    assert not (tmp_path / "egeria.json").exists()


@pytest.mark.parametrize("part", ["[]", "[[]]", "{}", '{"a":{}}', "0", '""', '{"step":0,"values":{}}'])
def test_a_record_takes_a_small_multiple_of_its_size(part, tmp_path):
    path = tmp_path / "egeria.json"
    count = 10**6 // len(part)
    path.write_text('{"name": "a", "version": 1, "metrics": [' + ",".join([part] * count) + "]}")
    tracemalloc.start()
    try:
        RunRecord.read(path)
    except RecordError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 30 * path.stat().st_size


@pytest.mark.parametrize("key", ["layer_modules", "panels"])
def test_a_record_has_so_many_parts_at_most(key, tmp_path):
    path = tmp_path / "egeria.json"
    panel = {"name": "a", "title": "", "caption": "", "x": "", "y": "", "series": {}}
    path.write_text(json.dumps({"name": "a", "version": 1, key: [panel if key == "panels" else "a"] * 5000}))
    with pytest.raises(RecordError, match="length"):
        RunRecord.read(path)
