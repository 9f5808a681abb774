"""Figures show what was recorded."""

import io

import pytest

from lightning_egeria import report
from lightning_egeria.core.training.panels import Panel
from support.report import run


def test_a_plain_run_has_its_times_only():
    assert list(report.figures(run("plain"))) == ["step_time", "phases"]


def test_a_run_with_freezing_and_cache_has_all_of_its_own():
    assert list(report.figures(run("ours", frozen_at=9))) == ["plasticity", "depth", "step_time", "phases", "cache"]


def test_several_runs_are_compared():
    drawn = report.figures([run("plain"), run("ours", 0.5, frozen_at=9)])
    assert next(iter(drawn)) == "accuracy"
    labels = [text.get_text() for text in drawn["accuracy"].axes[0].get_legend().get_texts()]
    assert labels == ["plain: 30.0 s", "ours: 15.0 s, 2.00x"]


def test_each_panel_compares_at_most_five_runs_of_as_many_colours():
    figure = report.figures([run("plain"), *(run(f"run{number}") for number in range(6))])["accuracy"]
    for axes, names in zip(
        figure.axes, [["plain", "run0", "run1", "run2", "run3"], ["plain", "run4", "run5"]], strict=True
    ):
        legend = axes.get_legend()
        assert [text.get_text().split(":")[0] for text in legend.get_texts()] == names
        assert len({line.get_color() for line in legend.get_lines()}) == len(names)
        figure.canvas.draw()
        assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


def test_of_many_series_the_first_and_the_last_are_named():
    record = run("ours")
    series = {f"search {number}": [(number, 1.0)] for number in range(9)}
    record.panels = [Panel("speeds", "Speeds", "Nine.", "search", "speed", series, kind="bars")]
    (axes,) = report.figures(record)["speeds"].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["search 0", "search 8"]
    assert len({patch.get_facecolor() for patch in axes.patches}) == 9


@pytest.mark.parametrize("count", [2, 5])
def test_of_a_few_series_each_is_named(count):
    record = run("ours")
    series = {f"search {number}": [(0, 1.0 + number), (1, 2.0)] for number in range(count)}
    record.panels = [Panel("speeds", "Speeds", "Some.", "search", "speed", series)]
    (axes,) = report.figures(record)["speeds"].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(series)
    assert len({line.get_color() for line in axes.lines}) == count


@pytest.mark.parametrize(("low", "high", "shown"), [(2, 7, "3"), (3e-4, 3.9e-4, "0.00034"), (0.9e-5, 2e-5, "2e-05")])
def test_a_logarithmic_axis_within_a_decade_has_labels(low, high, shown):
    record = run("ours")
    record.panels = [Panel("rate", "Rate", "Rises.", "steps", "rate", {"rate": [(0, low), (1, high)]}, log=True)]
    figure = report.figures(record)["rate"]
    figure.draw_without_rendering()
    axis = figure.axes[0].yaxis
    labels = [tick.label1.get_text() for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    labels = [label.replace("\N{MINUS SIGN}", "-") for label in labels]
    drawn = [label for label in labels if label and low <= float(label) <= high]
    assert len(set(drawn)) >= 2
    assert shown in drawn


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


def test_panels_of_a_method_are_drawn_as_they_were_kept():
    record = run("ours")
    losses = {"kept": [(0.5, 3), (1.5, 1)], "left": [(0.5, 1)]}
    record.panels = [
        Panel("noise", "Noise", "It grows.", "steps", "samples", {"noise": [(1, 10.0), (2, 20.0)]}, log=True),
        Panel("losses", "Losses", "Kept and left.", "loss", "samples", losses, kind="bars"),
        Panel(
            "branches", "Branches", "Two.", "steps", "", {"0.1": [(0, 5)], "0.2 won": [(0, 5), (6, 9)]}, kind="spans"
        ),
    ]
    drawn = report.figures(record)
    (noise,), (bars,), (spans,) = (drawn[panel.name].axes for panel in record.panels)
    assert list(noise.lines[0].get_ydata()) == [10, 20]
    assert noise.get_yscale() == "log"
    assert [label.get_text() for label in noise.get_yticklabels() if "$" in label.get_text()] == []
    assert [patch.get_height() for patch in bars.patches] == [3, 1, 1]
    assert [patch.get_width() for patch in bars.patches] == pytest.approx([0.45, 0.45, 0.45])  # beside each other
    assert [patch.get_x() for patch in bars.patches] == pytest.approx([0.05, 1.05, 0.5])
    places = [path.vertices[:, 0] for row in spans.collections for path in row.get_paths()]
    assert [(place.min(), place.max()) for place in places] == [(0, 5), (0, 5), (6, 9)]
    assert [label.get_text() for label in spans.get_yticklabels()] == ["0.1", "0.2 won"]
