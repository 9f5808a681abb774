"""The page of one or several runs."""

import re

import pytest
from report_runs import run

from lightning_egeria import report
from lightning_egeria.freezing.savings import Savings
from lightning_egeria.report.page import page
from lightning_egeria.training.panels import Panel


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
    ("done", "lost", "held_back", "words"),
    [
        (0, 7, None, "No evaluation was completed; 7 were late or dropped."),
        (0, 0, None, "The run ended before its first evaluation. Lower evaluate_every_n_steps."),
        (5, 7, None, "In 5 evaluations, no layer module stayed below"),
        (0, 7, "the learning rate is 1.0e-01", "The learning rate is 1.0e-01. A model trained from scratch freezes"),
    ],
)
def test_a_page_says_that_nothing_froze_and_why(done, lost, held_back, words):
    record = run("calm")
    record.layer_modules = ["net.a", "net.b"]
    record.savings = Savings((), 0, 0.036, None, 0.1, -0.1, done, lost, 0, "float32", 100, 200, held_back=held_back)
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


def test_a_page_tells_what_a_panel_shows():
    record = run("ours")
    record.panels = [Panel("noise", "Noise <scale>", "It grows & grows.", "steps", "samples", {"noise": [(1, 10.0)]})]
    text = page([record], report.figures(record))
    assert "<b>Noise &lt;scale&gt;</b> It grows &amp; grows." in text
