"""What a run says of its searches, and what a report draws of them."""

from lightning_egeria import BranchTuner, Choice
from lightning_egeria.core.training.panels import panels_of
from lightning_egeria.methods.tuning.display import MOST_ROWS, closing_lines, panels_of_searches
from lightning_egeria.methods.tuning.record import SearchRecord
from support.models import Classifier, fit


def branch(lr, steps, speed, label="converging"):
    return {"setting": {"lr": lr}, "steps": steps, "speed": speed, "label": label, "failed": None}


def record(step=10, winner=1, branches=None):
    branches = branches or [branch(0.1, 8, 0.2), branch(0.5, 8, 0.4), branch(1e9, 4, 0.0, "diverged")]
    setting = branches[winner]["setting"] if winner is not None else {"lr": 0.1}
    return SearchRecord(step, "of the test", "it is over", branches, winner, 8, 1.5, setting)


def test_the_closing_lines():
    assert list(closing_lines([], 9.0)) == [
        "no search ran: none was due (at_epochs, monitor), or the budget was too small (see above)"
    ]
    assert list(closing_lines([record(), record(40, None)], 10.0)) == [
        "2 searches took 40 steps and 3.0 s (30% of the run)",
        "step 10: 3 settings, 1 of which diverged or failed, 20 steps, 1.5 s: lr=0.5 won",
        "step 40: 3 settings, 1 of which diverged or failed, 20 steps, 1.5 s: no setting made progress",
    ]


def test_the_figures():
    tree, speeds, times = panels_of_searches([record(), record(40, None)])
    assert list(tree.series.items())[:3] == [
        ("10/0: lr=0.1", [(10, 18)]),
        ("10/1: lr=0.5 (won)", [(10, 18)]),
        ("10/2: lr=1e+09 (diverged)", [(10, 14)]),
    ]
    assert speeds.series["search at step 40"] == [(0, 0.2), (1, 0.4), (2, 0.0)]
    assert times.series == {"seconds": [(10, 1.5), (40, 1.5)]}


def test_of_many_branches_the_winner_and_the_fastest_are_shown():
    many = [branch(number, 2, float(number)) for number in range(1, 50)]
    (tree, *_) = panels_of_searches([record(branches=many, winner=0)])
    assert len(tree.series) == MOST_ROWS
    assert next(iter(tree.series)) == "10/0: lr=1 (won)"
    assert list(tree.series)[-1] == "10/48: lr=49"


def test_a_report_finds_them():
    callback = BranchTuner({"lr": Choice([0.05, 0.2])}, first_steps=2, max_share=9)
    trainer = fit(Classifier(), callback, epochs=1)
    assert [one.name for one in panels_of(trainer)] == ["tuning_branches", "tuning_speeds", "tuning_seconds"]
    assert panels_of_searches([])[0].series == {}
