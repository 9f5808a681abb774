"""Pictures and the page are made of what was recorded."""

import io
import re

import pytest
from rich.console import Console

from lightning_egeria import report
from lightning_egeria.errors import RecordError
from lightning_egeria.freezing.savings import Savings
from lightning_egeria.report.command import main
from lightning_egeria.report.comparison import common_metric, summary_table, times_to_target
from lightning_egeria.report.drawing import accuracy
from lightning_egeria.report.page import page
from lightning_egeria.report.record import CachePoint, EvaluationPoint, MetricPoint, RunRecord, StepTimes


def run(name, speed=1.0, frozen_at=None, accuracies=(0.5, 0.7, 0.8)):
    record = RunRecord(name, about={"torch": "2.x"})
    for step in range(1, 31):
        depth = 2 if frozen_at is not None and step > frozen_at else 0
        record.add_step(StepTimes(step, 1, depth, 0.001, 0.01 * speed, 0.0 if depth else 0.02, 0.004, 0.001))
    record.metrics = [MetricPoint(10 * (i + 1), 10 * speed * (i + 1), {"val/acc": a}) for i, a in enumerate(accuracies)]
    if frozen_at is not None:
        record.layer_modules = ["net.<stem>", "net.{a}", "net.b"]
        record.events = [{"step": frozen_at, "kind": "freeze", "depth": 2, "reason": "slope < threshold"}]
        record.evaluations = [
            EvaluationPoint(s, [1e-3 / s, 2e-3 / s, 3e-3], [None, 1e-4, -1e-4]) for s in range(2, 12, 2)
        ]
        record.cache = [CachePoint(10, 0, 0, 5, 100), CachePoint(30, 50, 10, 20, 5000)]
        record.savings = Savings((), 2, 0.036, 0.016, 0.1, 3.0, 5, 0, 0, "float32", 100, 200)
    return record


def test_a_plain_run_has_its_times_only():
    assert list(report.figures(run("plain"))) == ["step_time", "phases"]


def test_a_run_with_freezing_and_cache_has_all_of_its_own():
    assert list(report.figures(run("ours", frozen_at=9))) == ["plasticity", "depth", "step_time", "phases", "cache"]


def test_several_runs_are_compared():
    drawn = report.figures([run("plain"), run("ours", 0.5, frozen_at=9)])
    assert next(iter(drawn)) == "accuracy"
    labels = [text.get_text() for text in drawn["accuracy"].axes[0].get_legend().get_texts()]
    assert labels == ["plain: 30.0 s", "ours: 15.0 s, 2.00x"]


def test_lines_are_what_was_recorded():
    record = run("ours", frozen_at=9)
    top, bottom = report.figures(record)["plasticity"].axes
    assert [list(line.get_ydata()) for line in top.lines[:3]] == [
        [point.plasticity[index] for point in record.evaluations] for index in range(3)
    ]
    assert list(bottom.lines[2].get_ydata()) == [1e-4] * 5  # the size of a slope that falls
    (steps,) = report.figures(record)["step_time"].axes
    assert list(steps.lines[0].get_ydata()) == pytest.approx([times.seconds * 1e3 for times in record.steps])


def test_names_are_drawn_as_they_are():
    ours = run("$\\frac$", 0.5, frozen_at=9)
    ours.layer_modules[0] = "net.$\\sqrt$"
    for figure in report.figures([run("plain"), ours]).values():
        figure.savefig(io.BytesIO(), format="svg")  # a formula of LaTeX that has no end would raise
    (legend,) = [axes.get_legend() for axes in report.figures(ours)["plasticity"].axes if axes.get_legend() is not None]
    assert legend.get_texts()[0].get_text() == "net.$\\sqrt$"


def test_phases_before_and_after():
    (axes,) = report.figures(run("ours", frozen_at=9))["phases"].axes
    totals = [text.get_text().strip() for text in axes.texts]
    assert totals == ["36.0 ms", "16.0 ms"]


def test_what_was_reached_before_anything_froze_is_not_called_faster():
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


def test_the_page_needs_nothing_else_and_escapes_names():
    records = [run("plain {x}"), run("<ours>", 0.5, frozen_at=9)]
    text = page(records, report.figures(records))
    assert text.count("<svg") == 6
    assert not re.search(r'(src|href)="(?!#)', text.replace("http://www.w3.org", ""))
    assert "slope &lt; threshold" in text
    assert "<td>plain {x}</td>" in text
    assert "<ours>" not in text
    assert "slope < threshold" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
    assert "fill: #" in text or "stroke: #" in text


@pytest.mark.parametrize(
    ("done", "held_back", "words"),
    [
        (0, None, "No evaluation was completed; 7 were late or dropped."),
        (5, None, "In 5 evaluations, no layer module stayed below"),
        (0, "the learning rate is 1.0e-01", "The learning rate is 1.0e-01. A model trained from scratch freezes only"),
    ],
)
def test_a_page_says_that_nothing_froze_and_why(done, held_back, words):
    record = run("calm")
    record.layer_modules = ["net.a", "net.b"]
    record.savings = Savings((), 0, 0.036, None, 0.1, -0.1, done, 3, 4, "float32", 100, 200, held_back=held_back)
    drawn = report.figures(record)
    assert list(drawn) == ["step_time", "phases"]
    text = page([record], drawn)
    assert f"<p><b>Nothing froze.</b> {words}" in text
    assert "<td>0/2</td>" in text
    labels = [text.get_text() for text in drawn["phases"].axes[0].get_yticklabels()]
    assert labels == ["nothing frozen"]


def test_a_page_names_the_run_of_each_picture():
    records = [run("plain"), run("ours", 0.5, frozen_at=9), run("later")]
    text = page(records, report.figures(records))
    assert "<h1>3 runs compared</h1>" in text
    assert "<b>Frozen depth: ours</b>" in text
    assert "<b>Accuracy against wall time</b>" in text


def test_a_page_has_the_whole_command_in_the_details():
    record = run("plain")
    record.about["command"] = f"train.py {'x' * 300}"
    record.overrides = ["model=timm", "seed=1"]
    text = page([record], {})
    assert "<h1>Run plain</h1>" in text
    assert f"<dt>command</dt><dd><code>train.py {'x' * 300}</code></dd>" in text
    assert "<dt>settings</dt><dd><code>model=timm seed=1</code></dd>" in text


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


def test_the_table_of_one_run_has_its_estimate():
    text = printed([run("ours", frozen_at=9)], 80)
    assert "estimated saving" in text
    assert "3.0 s" in text


def written(tmp_path, *records):
    for record in records:
        record.write(tmp_path / record.name / "egeria.json")
    return [str(tmp_path / record.name) for record in records]


def test_the_command_writes_a_page_and_pictures(tmp_path, capsys):
    folders = written(tmp_path, run("plain"), run("ours", 0.5, frozen_at=9))
    assert main(folders) == 0
    out = tmp_path / "ours" / "report"
    assert str(out / "report.html") in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "accuracy.png",
        "cache.png",
        "depth.png",
        "phases.png",
        "plasticity.png",
        "report.html",
        "step_time.png",
    ]
    assert all(path.stat().st_size > 1000 for path in out.iterdir())


def test_runs_below_a_folder_and_runs_of_one_name(tmp_path, capsys):
    for number in (0, 1):
        run("seed").write(tmp_path / "sweep" / str(number) / "egeria.json")
    assert main([str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    assert "sweep/0" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("metric", [None, "nonsense"])
def test_errors_are_one_line(tmp_path, capsys, metric):
    folders = written(tmp_path, run("plain"), run("ours")) if metric else [str(tmp_path)]
    assert main([*folders, *(["--metric", metric] if metric else [])]) == 2
    told = capsys.readouterr().err
    assert told.startswith("egeria-report: ")
    assert ("logged no 'nonsense'" if metric else "no egeria.json in or below") in told
    assert len(told.splitlines()) == 1


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path, capsys):
    folders = written(tmp_path, run("ours"))
    (tmp_path / "file").write_text("")
    assert main([*folders, "--out", str(tmp_path / "file" / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"egeria-report: cannot write to {tmp_path / 'file' / 'out'}: ")
    assert "--out" in told
    assert len(told.splitlines()) == 1


def test_fine_tuning_has_no_slopes(tmp_path):
    record = run("ours", frozen_at=9)
    for point in record.evaluations:
        point.slopes = [None, None, None]
    figure = report.figures(record)["plasticity"]
    assert len(figure.axes) == 1
    figure.savefig(tmp_path / "one.png")


def test_a_run_whose_evaluations_say_nothing_is_drawn(tmp_path):
    record = run("ours", frozen_at=9)
    for point in record.evaluations:
        point.slopes = point.plasticity = [None, 0.0, None]
    report.figures(record)["plasticity"].savefig(tmp_path / "one.png")


def test_pictures_show_themselves_in_a_notebook():
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in report.figures(run("plain")).values())
