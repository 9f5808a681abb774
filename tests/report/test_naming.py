"""Short names of runs."""

from pathlib import Path

import pytest

from lightning_egeria.report.naming import LONGEST_NAME, short_names, with_short_names
from lightning_egeria.report.record import RunRecord


def run(*overrides, name="13-05-22"):
    return RunRecord(name, overrides=list(overrides))


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([["a.b.lr=1"], ["a.b.lr=2"]], ["lr=1", "lr=2"]),
        ([["x=1", "callbacks=none"], ["x=1"]], ["callbacks=none", "defaults"]),
        (
            [["model.lr=1", "data.lr=3"], ["model.lr=2", "data.lr=4"]],
            ["model.lr=1, data.lr=3", "model.lr=2, data.lr=4"],
        ),
        ([["lr=1", "net.lr=1"], ["lr=2", "net.lr=2"]], ["lr=1, net.lr=1", "lr=2, net.lr=2"]),
        ([["~callbacks.freezing"], ["+trainer.limit=2"]], ["~callbacks.freezing", "limit=2"]),
        ([["model=timm", "seed=1"]], ["13-05-22"]),
        ([["seed=1"], ["seed=1"]], ["13-05-22 (1)", "13-05-22 (2)"]),
    ],
)
def test_names_are_the_settings_that_differ(runs, names):
    assert short_names([run(*overrides) for overrides in runs]) == names


def test_runs_of_one_name_are_told_apart_by_their_folders():
    paths = [Path("/runs/sweep/0/egeria.json"), Path("/runs/sweep/1/egeria.json")]
    assert short_names([run(name="seed"), run(name="seed")], paths) == ["sweep/0", "sweep/1"]
    assert short_names([run(name="plain"), run(name="ours")], paths) == ["plain", "ours"]


def test_long_names_lose_their_middle():
    runs = [run(f"path={'a' * 50}{end}") for end in ("one", "two")]
    first, second = short_names(runs)
    assert len(first) == len(second) == LONGEST_NAME
    assert first != second
    assert first.startswith("path=a")


def test_records_stay_as_they_are():
    records = [run("lr=1"), run("lr=2")]
    assert [record.name for record in with_short_names(records)] == ["lr=1", "lr=2"]
    assert [record.name for record in records] == ["13-05-22", "13-05-22"]
