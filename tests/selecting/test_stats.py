"""What selection has done."""

import numpy as np
import pytest

from lightning_egeria.methods.selecting.stats import BINS, SelectionStats, bin_edges


def test_epochs_add_up():
    stats = SelectionStats()
    assert (stats.share, stats.cost()) == (1.0, 1.0)
    stats.count(0, seen=8, trained=8)
    stats.count(1, seen=4, scored=4)
    stats.count(1, trained=2)
    assert stats.epochs == [(0, 8, 0, 8), (1, 4, 4, 2)]
    assert stats.share == pytest.approx(10 / 12)
    assert stats.cost(backward_over_forward=2) == pytest.approx((4 + 30) / 36)


def test_histograms_tell_kept_from_left():
    stats = SelectionStats()
    stats.count_losses(np.array([1e-9, 0.5, 0.5, 1e9, np.nan]), np.array([False, True, False, True, True]))
    assert len(stats.kept_losses) == len(stats.left_losses) == BINS == len(bin_edges()) + 1
    assert (stats.left_losses[0], stats.kept_losses[-1]) == (1, 2)
    assert sum(stats.kept_losses) == 3
    assert sum(stats.left_losses) == 2
