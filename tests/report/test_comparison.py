"""The runs side by side: which metric, when each reached the target, and the table."""

import io

import pytest
from rich.console import Console

from lightning_egeria.errors import RecordError
from lightning_egeria.report.comparison import common_metric, summary, summary_table, times_to_target
from lightning_egeria.report.drawing import accuracy
from lightning_egeria.report.record import RunRecord
from support.report import run


def test_reached_before_anything_froze_is_not_faster():
    first, second = times_to_target([run("plain"), run("ours", 0.5, frozen_at=40)], "val/acc")
    assert (first.ratio, second.ratio) == (1.0, None)
    assert second.note == "15.0 s, before anything froze"


def test_a_run_that_froze_nothing_has_no_ratio():
    ours = run("ours", 0.5)
    ours.layer_modules = ["net.a", "net.b"]
    _, second = times_to_target([run("plain"), ours], "val/acc")
    assert (second.ratio, second.note) == (None, "15.0 s, nothing froze")


def test_what_is_never_reached():
    _, second = times_to_target([run("plain"), run("ours", accuracies=(0.1, 0.2, 0.3))], "val/acc")
    assert (second.seconds, second.ratio, second.note) == (None, None, "not reached")


def test_a_loss_is_reached_from_above():
    plain, ours = run("plain"), run("ours", 0.5)
    for record, losses in ((plain, (0.9, 0.5, 0.4)), (ours, (0.6, 0.4, 0.5))):
        for point, loss in zip(record.metrics, losses, strict=True):
            point.values = {"val/loss": loss}
    assert [reached.note for reached in times_to_target([plain, ours], "val/loss")] == ["30.0 s", "10.0 s, 3.00x"]


def test_which_metric_is_compared():
    one, other = run("one"), run("other")
    for record in (one, other):
        for point in record.metrics:
            point.values |= {"train/acc": 1.0, "val/loss": 0.1}
    assert common_metric([one, other]) == "val/acc"
    with pytest.raises(RecordError, match="no logged metric in common"):
        common_metric([one, RunRecord("empty")])
    with pytest.raises(RecordError, match=r"logged no 'f1'; it logged \['train/acc', 'val/acc', 'val/loss'\]"):
        accuracy([one, other], "f1")


def printed(records, width):
    stream = io.StringIO()
    Console(file=stream, width=width).print(summary_table(records))
    return stream.getvalue()


def test_the_table_of_a_terminal_fits_into_80_columns():
    records = [run("plain"), run("a-name-with-no-space-at-which-to-break", 0.5, frozen_at=9)]
    text = printed(records, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for word in ("plain", "36.0", "31.0 → 11.0", "2/3", "30.0 s", "15.0 s", "0.8000", "time to 0.8", "15.0 s (2.00x)"):
        assert word in text


def test_a_table_of_slow_runs_loses_no_end_of_a_line():
    records = [run("cache=disk, callbacks=none, max_epochs=2"), run("max_epochs=3")]
    for record in records:
        for times in record.steps:
            times.rest = 2.4
        for point in record.metrics:
            point.seconds *= 7
            point.values = {"val/acc": point.values["val/acc"] + 0.0278}
    text = printed(records, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    heads, *rows = summary(records)
    assert all(cell in text for row in (heads, *rows) for cell in row[1:])


def test_the_table_of_one_run_has_its_estimate():
    text = printed([run("ours", frozen_at=9)], 80)
    assert "estimated saving" in text
    assert "3.0 s" in text
