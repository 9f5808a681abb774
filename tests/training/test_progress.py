"""Entries in the progress bar come and go."""

from types import SimpleNamespace

import pytest

from lightning_egeria.core.training.progress import BarEntry


class Bar:
    def get_metrics(self, trainer, pl_module):
        return {"loss": trainer + pl_module}


@pytest.fixture
def bar():
    return Bar()


@pytest.fixture
def trainer(bar):
    return SimpleNamespace(progress_bar_callback=bar)


def test_an_entry_stands_behind_those_of_lightning(bar, trainer):
    BarEntry(trainer, "frozen", lambda: "2/5")
    assert list(bar.get_metrics(1, 2).items()) == [("loss", 3), ("frozen", "2/5")]


def test_the_text_is_asked_for_at_each_refresh(bar, trainer):
    texts = iter(["0/5", "1/5"])
    BarEntry(trainer, "frozen", lambda: next(texts))
    assert [bar.get_metrics(1, 2)["frozen"] for _ in range(2)] == ["0/5", "1/5"]


def test_no_text_no_entry(bar, trainer):
    BarEntry(trainer, "cache", lambda: None)
    assert bar.get_metrics(1, 2) == {"loss": 3}


def test_entries_of_several_stand_side_by_side(bar, trainer):
    first = BarEntry(trainer, "frozen", lambda: "2/5")
    second = BarEntry(trainer, "cache", lambda: "90 %")
    assert bar.get_metrics(1, 2) == {"loss": 3, "frozen": "2/5", "cache": "90 %"}
    first.remove()
    assert bar.get_metrics(1, 2) == {"loss": 3, "cache": "90 %"}
    second.remove()
    assert vars(bar) == {}


def test_an_entry_of_the_same_name_replaces_the_first(bar, trainer):
    BarEntry(trainer, "frozen", lambda: "old")
    BarEntry(trainer, "frozen", lambda: "new")
    assert bar.get_metrics(1, 2)["frozen"] == "new"


def test_removing_twice_is_safe(bar, trainer):
    entry = BarEntry(trainer, "frozen", lambda: "2/5")
    entry.remove()
    entry.remove()
    assert vars(bar) == {}
    assert bar.get_metrics(1, 2) == {"loss": 3}


@pytest.mark.parametrize("trainer", [None, SimpleNamespace(progress_bar_callback=None)])
def test_without_a_bar_nothing_happens(trainer):
    entry = BarEntry(trainer, "frozen", lambda: "2/5")
    entry.remove()
    assert trainer is None or vars(trainer) == {"progress_bar_callback": None}
