"""What the user is told, once and by one process."""

import logging
import subprocess
import sys
import warnings

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_egeria.core.training.notices import Notices


@pytest.fixture
def notices():
    return Notices("freezing")


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


def test_lines_appear_where_those_of_lightning_do(notices, caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        notices.inform("3 layer modules froze")
    (record,) = caplog.records
    assert record.name.startswith("lightning.pytorch.")
    assert record.message == "freezing: 3 layer modules froze"


def test_line_about_one_thing_is_logged_once(notices, caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        for shape in (1, 2):
            notices.inform(f"a shape of {shape}", once="shapes")
            notices.inform("3 layer modules froze")
    assert [record.message for record in caplog.records] == [
        "freezing: a shape of 1",
        "freezing: 3 layer modules froze",
        "freezing: 3 layer modules froze",
    ]


def test_without_a_bar_no_lock_for_several_processes_is_made():
    """A killed process would leave its semaphore."""
    program = (
        "import tqdm, tqdm.std; from lightning_egeria.core.training.notices import log_line; log_line('text');"
        "raise SystemExit(hasattr(tqdm.std.TqdmDefaultWriteLock, 'mp_lock'))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_warning_begins_with_its_topic(notices):
    assert warned(lambda: notices.warn("something is wrong")) == ["freezing: something is wrong"]


def test_a_problem_with_a_name_is_told_once(notices):
    def twice():
        notices.warn("first text", once="problem")
        notices.warn("second text", once="problem")
        notices.warn("another", once="other problem")

    assert warned(twice) == ["freezing: first text", "freezing: another"]


def test_without_a_name_each_warning_is_told(notices):
    def twice():
        notices.warn("text")
        notices.warn("text")

    assert warned(twice) == ["freezing: text"] * 2


def test_another_run_is_told_anew():
    def runs():
        for _ in range(2):
            Notices("freezing").warn("text", once="problem")

    assert warned(runs) == ["freezing: text"] * 2


def test_only_the_first_process_speaks(notices, caplog, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        assert warned(lambda: (notices.inform("line"), notices.warn("text"))) == []
    assert caplog.records == []
