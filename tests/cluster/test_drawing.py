"""The pictures show what the record holds."""

import dataclasses
import itertools

import numpy as np
import pytest

from lightning_egeria.cluster import drawing
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.tiresias import Tiresias
from support.cluster import example


@pytest.fixture
def record():
    workload, applications = example(jobs=5)
    return simulate(workload, applications, Cluster.of(4, 4), Tiresias())


def test_each_held_device_is_coloured(record):
    (mesh,) = drawing.devices(record).axes[0].collections
    coloured = ~np.ma.getmaskarray(mesh.get_array())
    assert coloured.sum(axis=0).tolist() == [interval.devices for interval in record.intervals[:-1]]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [interval.time / 3600 for interval in record.intervals]


def test_completion_times_rise_to_all_jobs(record):
    (line,) = drawing.completion_times([record]).axes[0].lines
    assert line.get_ydata()[-1] == 1
    assert sorted(line.get_xdata()[1:]) == pytest.approx(sorted(t / 60 for t in record.completion_times.values()))


def test_utilisation_has_a_panel_for_each_record(record):
    for axes in drawing.utilisation([record, record]).axes:
        (area,) = axes.collections
        used = {interval.devices / 16 for interval in record.intervals}
        assert {y for path in area.get_paths() for y in path.vertices[:, 1]} == used | {0}


def test_policies_that_take_the_same_time_share_a_line(record):
    other = dataclasses.replace(record, policy="fcfs")
    (axes,) = drawing.completion_times([record, other]).axes
    (line,) = axes.lines
    assert " ".join(line.get_label().split()).startswith("tiresias, fcfs: ")


def test_a_panel_has_at_most_five_lines(record, monkeypatch):
    slower = itertools.count(1)
    monkeypatch.setattr(
        type(record), "completion_times", property(lambda self: dict.fromkeys(record.submitted, 60.0 * next(slower)))
    )
    figure = drawing.completion_times([record] * 7)
    assert [len(axes.lines) for axes in figure.axes] == [5, 2]
    for axes in figure.axes:
        assert len({line.get_color() for line in axes.lines}) == len(axes.lines)
        figure.canvas.draw()
        assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1
