"""The command `egeria-report`."""

import pytest
from report_runs import run

from lightning_egeria.report.command import main


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
    assert told.startswith("egeria-report: ")
    assert ("logged no 'nonsense'" if metric else "no egeria.json in or below") in told
    assert len(told.splitlines()) == 1


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path, capsys):
    folders = written(tmp_path, run("ours"))
    (tmp_path / "file").write_text("")
    assert main([*folders, "--out", str(tmp_path / "file" / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"egeria-report: cannot write to {tmp_path / 'file' / 'out'}: ")
    assert "--out" in told
    assert len(told.splitlines()) == 1
