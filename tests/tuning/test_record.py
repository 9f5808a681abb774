"""Records go through a checkpoint and come back."""

import json
import math

from lightning_egeria.methods.tuning.record import SearchRecord, describe


def test_a_record_returns_from_its_state():
    branches = [{"setting": {"lr": 0.1}, "steps": 4, "speed": 0.5, "range": -2.0}]
    record = SearchRecord(3, "because", "done", branches, 0, 4, 1.5, {"lr": 0.1})
    assert SearchRecord.from_state(json.loads(json.dumps(record.state()))) == record
    assert record.steps == 4


def test_what_is_not_finite_is_none():
    record = SearchRecord(0, "a", "b", [{"setting": {}, "steps": 1, "range": math.nan}], None, 1, 0.0, {})
    assert record.state()["branches"][0]["range"] is None
    json.dumps(record.state(), allow_nan=False)


def test_a_setting_in_words():
    assert describe({"lr": 1e-5, "batch_size": 64, "nesterov": True}) == "lr=1e-05, batch_size=64, nesterov=True"
