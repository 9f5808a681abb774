"""`egeria simulate`: from an example to logs, pictures and a table; mistakes in one line."""

import json
import sys

import pytest

from lightning_egeria import command
from lightning_egeria.cluster.records import Record


def main(arguments):
    return command.main(["simulate", *arguments])


@pytest.fixture
def workload(tmp_path, capsys):
    assert main(["--example", str(tmp_path / "example"), "--jobs", "6"]) == 0
    capsys.readouterr()
    return tmp_path / "example" / "workload.csv"


def test_simulate_writes_logs_and_pictures(workload, tmp_path, capsys):
    out = tmp_path / "out"
    options = [str(workload), "--out", str(out), "--nodes", "4", "--interval", "120"]
    assert main([*options, "--policy", "pollux", "tiresias", "pollux"]) == 0
    shown, progress = capsys.readouterr()
    assert progress.count("pollux: 6 jobs") == 1
    for name in ("pollux", "tiresias"):
        record = Record.read(out / f"{name}.jsonl")
        assert (record.policy, len(record.completion_times)) == (name, 6)
        assert f"{record.average_completion_s:.0f} s" in shown
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {"devices-pollux.png", "devices-tiresias.png", "completion-times.png", "utilisation.png"}


def test_figures_for_programs(workload, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(workload), "--policy", "fcfs", "fair", "--out", str(out), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["policy"] for one in found] == ["fcfs", "fair"]
    assert all(0 < one["utilisation"] <= 1 for one in found)
    assert {path.name for path in out.iterdir()} == {"fcfs.jsonl", "fair.jsonl"}


def test_without_a_workload(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == "egeria simulate: name a workload, or write one with --example FOLDER\n"
    assert main(["missing.csv"]) == 2
    assert "missing.csv cannot be read" in capsys.readouterr().err


def test_traces_are_found_one_folder_above(workload, tmp_path):
    below = workload.parent / "workloads"
    below.mkdir()
    moved = workload.rename(below / "workload.csv")
    options = [str(moved), "--out", str(tmp_path / "out"), "--policy", "fcfs"]
    assert main(options) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--traces", "."], "no traces of ranking"),
        (["--traces", "nowhere"], "no traces of ranking, vision in nowhere"),
        (["--interval", "0"], "interval_s"),
        (["--nodes", "1"], "waiting on an idle cluster"),
    ],
)
def test_a_mistake_is_one_line(workload, tmp_path, capsys, options, message):
    arguments = [str(workload), "--policy", "fcfs", "--out", str(tmp_path / "out"), *options]
    assert main(arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("egeria simulate: ")
    assert message in last


@pytest.mark.parametrize("option", ["--nodes", "--devices"])
@pytest.mark.parametrize("number", ["0", "9" * 30])
def test_a_number_has_bounds(capsys, option, number):
    with pytest.raises(SystemExit):
        main(["x", option, number])
    assert f"argument {option}: expected a whole number from 1 to" in capsys.readouterr().err


def test_an_unwritable_folder_is_named(workload, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(workload), "--out", str(tmp_path / "file" / "out")]) == 2
    assert f"egeria simulate: {tmp_path / 'file' / 'out'}: Not a directory" in capsys.readouterr().err


def test_without_matplotlib_it_says_so(workload, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lightning_egeria.cluster.drawing", raising=False)
    monkeypatch.delattr("lightning_egeria.cluster.drawing", raising=False)
    assert main([str(workload), "--out", str(tmp_path / "out")]) == 2
    assert "lightning-egeria[report]" in capsys.readouterr().err


HOSTILE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize("what", ["application", "name", "column", "folder"])
def test_a_terminal_is_told_nothing_by_a_workload(what, tmp_path, capsys):
    path = tmp_path / "workload.csv"
    words = {"application": ("a", HOSTILE), "name": (HOSTILE, "")}.get(what, ("a", "b"))
    head = f"name,time,application,num_replicas,{HOSTILE if what == 'column' else 'batch_size'}"
    path.write_text(f"{head}\n{words[0]},1,{words[1]},1,32\n")
    folder = ["--traces", str(tmp_path / HOSTILE)] if what == "folder" else []
    assert main([str(path), *folder, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in told.out + told.err)


def test_logs_and_pictures_are_not_written_through_links(tmp_path):
    assert main(["--example", str(tmp_path / "example"), "--jobs", "2"]) == 0
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "mine").write_text("mine")
    for name in ("fair.jsonl", "devices-fair.png", "completion-times.png", "utilisation.png"):
        (out / name).symlink_to(tmp_path / "mine")
    workload = str(tmp_path / "example" / "workload.csv")
    assert main([workload, "--policy", "fair", "--out", str(out)]) == 0
    assert (tmp_path / "mine").read_text() == "mine"
