"""The command `egeria report`."""

import json
import os
import time

import pytest

from lightning_egeria import command
from lightning_egeria.core.training.panels import Panel
from support.report import run


def main(arguments):
    return command.main(["report", *arguments])


def written(tmp_path, *records):
    for record in records:
        record.write(tmp_path / record.name / "egeria.json")
    return [str(tmp_path / record.name) for record in records]


def test_the_command_writes_a_page_and_pictures(tmp_path, capsys):
    folders = written(tmp_path, run("plain"), run("ours", 0.5, frozen_at=9))
    assert main(folders) == 0
    out = tmp_path / "ours" / "report"
    assert str(out / "report.html") in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "accuracy.png",
        "cache.png",
        "depth.png",
        "phases.png",
        "plasticity.png",
        "report.html",
        "step_time.png",
    ]
    assert all(path.stat().st_size > 1000 for path in out.iterdir())


def test_facts_for_programs(tmp_path, capsys):
    assert main([*written(tmp_path, run("plain"), run("ours", 0.5, frozen_at=9)), "--json"]) == 0
    plain, ours = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (plain["run"], plain["frozen"], ours["run"]) == ("plain", 0, "ours")
    assert ours["frozen"] > 0
    assert plain["metrics"]
    assert not (tmp_path / "ours" / "report").exists()


def test_runs_below_a_folder_and_runs_of_one_name(tmp_path, capsys):
    for number in (0, 1):
        run("seed").write(tmp_path / "sweep" / str(number) / "egeria.json")
    assert main([str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    assert "sweep/0" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("metric", [None, "nonsense"])
def test_errors_are_one_line(tmp_path, capsys, metric):
    folders = written(tmp_path, run("plain"), run("ours")) if metric else [str(tmp_path)]
    assert main([*folders, *(["--metric", metric] if metric else [])]) == 2
    told = capsys.readouterr().err
    assert told.startswith("egeria report: ")
    assert ("logged no 'nonsense'" if metric else "no egeria.json in or below") in told
    assert len(told.splitlines()) == 1


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path, capsys):
    folders = written(tmp_path, run("ours"))
    (tmp_path / "file").write_text("")
    assert main([*folders, "--out", str(tmp_path / "file" / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"egeria report: cannot write to {tmp_path / 'file' / 'out'}: ")
    assert "--out" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("name", ["report.html", "plasticity.png", "depth.png"])
@pytest.mark.parametrize("hard", [False, True])
def test_nothing_is_written_through_a_link(name, hard, tmp_path):
    """A folder that somebody has sent may hold links: tar keeps them."""
    (folder,) = written(tmp_path, run("ours", 0.5, frozen_at=9))
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    out = tmp_path / "ours" / "report"
    out.mkdir()
    if hard:
        os.link(mine, out / name)
    else:
        (out / name).symlink_to(mine)
    assert main([folder]) == 0
    assert mine.read_text() == "mine"
    assert (out / name).stat().st_size > 1000
    assert not (out / name).is_symlink()


def test_a_folder_for_the_report_that_is_a_link_is_refused(tmp_path, capsys):
    (folder,) = written(tmp_path, run("ours"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ours" / "report").symlink_to(tmp_path / "elsewhere")
    assert main([folder]) == 2
    assert "is a link. Name the directory to write to with --out" in capsys.readouterr().err
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert main([folder, "--out", str(tmp_path / "ours" / "report")]) == 0  # now its user says so
    assert (tmp_path / "elsewhere" / "report.html").is_file()


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.mark.filterwarnings("ignore:Glyph")  # the font has no such letters
@pytest.mark.parametrize("where", ["name", "metric", "overrides", "version"])
def test_a_terminal_is_told_nothing_by_a_record(where, tmp_path, capsys):
    (folder,) = written(tmp_path, run("ours", 0.5, frozen_at=9))
    path = tmp_path / "ours" / "egeria.json"
    state = json.loads(path.read_text())
    if where == "metric":
        state["metrics"] = [{**point, "values": {HOSTILE: 1.0}} for point in state["metrics"]]
    else:
        state[where] = [HOSTILE] if where == "overrides" else HOSTILE
    state["events"] = []
    path.write_text(json.dumps(state))
    main([folder, folder])
    told = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in told.out + told.err)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bars", "spans", "line", "events"])
def test_a_small_record_does_not_take_minutes(kind, tmp_path):
    record = run("ours")
    points = [(float(place), 1.0) for place in range(2000)]
    if kind == "events":
        record.events = [{"step": place, "kind": "freeze", "depth": 1, "reason": ""} for place in range(20_000)]
    else:
        record.panels = [Panel("a", "A", "", "x", "y", {str(one): points for one in range(10)}, kind)]
    (folder,) = written(tmp_path, record)
    began = time.monotonic()
    assert main([folder]) == 0
    assert time.monotonic() - began < 15
