"""The page of one or several runs."""

import re

import pytest

from lightning_egeria import report
from lightning_egeria.core.training.panels import Panel
from lightning_egeria.freezing.savings import Savings
from lightning_egeria.report.page import page
from support.report import run


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
    ("reason", "words"),
    [
        ("7 of 7 evaluations came late", "7 of 7 evaluations came late."),
        ("the learning rate is 1.0e-01. Use <another>", "The learning rate is 1.0e-01. Use &lt;another&gt;."),
        (None, "The record gives no reason."),
    ],
)
def test_a_page_says_that_nothing_froze_and_why(reason, words):
    record = run("calm")
    record.layer_modules = ["net.a", "net.b"]
    record.savings = Savings((), 0, 0.036, None, 0.1, -0.1, 5, 7, 0, "float32", 100, 200, why_nothing_froze=reason)
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
