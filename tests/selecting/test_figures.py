"""What a report shows of selection."""

import pytest

from lightning_egeria.core.training.panels import panels_of
from lightning_egeria.methods.selecting.figures import figures_of
from lightning_egeria.methods.selecting.stats import SelectionStats
from support.selecting import trained


def test_a_run_shows_what_it_counted():
    _, trainer, data = trained(epochs=3)
    share, losses, cost = panels_of(trainer)
    assert share.series["trained"] == [(epoch, count / 40) for epoch, _, _, count in data.selection.epochs]
    assert share.series["scored"] == [(0, 0), (1, 1), (2, 1)]
    kept = [count for _, count in losses.series["kept"]]
    left = [count for _, count in losses.series["dropped"]]
    assert sum(kept) == sum(count for _, _, _, count in data.selection.epochs[1:])
    assert sum(kept) + sum(left) == 80
    mean = [sum(x * n for x, n in points) / sum(n for _, n in points) for points in losses.series.values()]
    assert mean[0] > mean[1]  # kept samples have the higher losses
    assert cost.series["counted"][0] == (0, 1)
    assert cost.series["counted"][1][1] == pytest.approx(1 / 3 + share.series["trained"][1][1])
    assert [epoch for epoch, _ in cost.series["measured"]] == [0, 1, 2]
    assert cost.series["measured"][0] == (0, 1)


def test_nothing_is_shown_of_nothing():
    assert figures_of(SelectionStats()) == []
    stats = SelectionStats()
    stats.count(1, seen=8, scored=8, trained=4)
    assert not any(figures_of(stats)[1].series.values())  # no losses
    assert figures_of(stats)[2].series["measured"] == []  # and no whole epoch
