import os
import time

from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import State, Status
from lightning_egeria.jobs.listing import as_text, table
from support.jobs.described import described, submitted


def test_a_line_for_each_job(tmp_path):
    home = Home(tmp_path / "home")
    with home.history() as history:
        first, second = (submitted(home, described(tmp_path), history, after)[0] for after in ((), (1,)))
        home.folder(first).write_status(Status(State.RUNNING, 2, started=time.time() - 125))
        home.folder(first).beat()
        os.utime(home.folder(first).path / "heartbeat", (1, time.time() - 90))
        lines = table(history.unfinished(), home)
    assert lines[0].split() == ["ID", "NAME", "STATE", "WHERE", "ATTEMPT", "FOR", "NOTE"]
    assert lines[1].startswith("1   hello  running  local  2        2m 5s")
    assert "no heart-beat for 1m 30s" in lines[1]
    assert lines[2].endswith(f"after {first}")
    assert second == 2


def test_long_names_and_notes_fit_a_terminal(home, history, tmp_path):
    name = "finetune-imagenette-resnet20-with-a-rather-long-name-0123456"
    ids = [id for number in range(2) for id in submitted(home, described(tmp_path, name=f"{name}.{number}"), history)]
    status = home.folder(ids[0]).status()
    status.message = "execute: ended with status 3; its log says why"
    home.folder(ids[0]).write_status(status)
    whole, fitting = table(history.unfinished(), home), table(history.unfinished(), home, 80)
    assert max(map(len, whole)) > 120 > 80 == max(map(len, fitting))
    assert "  finetune-image…23456.0  queued  " in fitting[1]
    assert "…23456.1  " in fitting[2]
    assert fitting[1].endswith("…")
    assert "  execute: ended with " in fitting[1]
    for width in (1, 40, 60, 100, 200):
        for line, other in zip(table(history.unfinished(), home, width), whole, strict=True):
            assert line.split()[0] == other.split()[0]
            assert len(line) <= max(width, 60)
    assert table(history.unfinished(), home, 400) == whole


def test_what_is_known_of_a_job_fits_a_terminal():
    found = {"id": 1, "after": (2, 3), "log": "/a/path/that/is/longer/than/the/line", "message": "some words " * 5}
    assert [*as_text(found, 30)] == [
        "id       1",
        "after    2",
        "         3",
        "log      /a/path/that/is/longer/than/the/line",
        "message  some words some words",
        "         some words some words",
        "         some words",
    ]
    assert [*as_text(found)][-1] == "message  " + "some words " * 5
