"""The figures of a run."""

from lightning_egeria.methods.partial.display import panels_of_savings
from lightning_egeria.methods.partial.savings import PartialSavings, RankSavings


def test_figures_have_the_numbers_of_the_run():
    ranks = (RankSavings(0.5, 3e6, 4e6), RankSavings(None, 2e6, 4e6))
    found = panels_of_savings(PartialSavings(8, ranks, {"stem": 8, "deep": 16}, {1: 1_000_000, 0: 4_000_000}))
    gradients, by_rank, activations = (panel.series for panel in found)
    assert gradients == {"gradients": [(0, 8), (1, 16)]}
    assert by_rank == {"backward": [(0, 50)], "bytes received": [(0, 75), (1, 50)]}
    assert activations == {"activations": [(0, 4.0), (1, 1.0)]}


def test_one_process_receives_nothing():
    found = panels_of_savings(PartialSavings(8, (RankSavings(0.5, 0, 0),), {"stem": 8}, {}))
    assert [list(panel.series) for panel in found] == [["gradients"], ["backward"], ["activations"]]
