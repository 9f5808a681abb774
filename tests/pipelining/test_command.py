"""`egeria plan`: a table, timelines, files; mistakes in one line."""

import json
import os
import re
import sys
import time

import pytest

from lightning_egeria import command
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node
from lightning_egeria.methods.pipelining.plan import Plan
from support.pipelining.graphs import branches


def main(arguments):
    """Run the command; returns its exit status, also where the parser ends it."""
    try:
        return command.main(["plan", *map(str, arguments)])
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(branches(4).to_state()))
    return path


def test_it_prints_and_draws_the_plan(graph, tmp_path, capsys):
    settings = [graph, "--devices=6", "--micro-batches=4", "--max-width=1", "--out", tmp_path / "out"]
    assert main(settings) == 0
    shown = capsys.readouterr().out
    assert "throughput of the graph over the chain: 1.50" in shown
    assert "branch3.0" in shown
    assert "letters: its backward pass" in shown
    assert (tmp_path / "out" / "timelines.png").is_file()
    written = tmp_path / "out" / "plan.json"
    assert Plan.from_json(written.read_text()).in_flight == (3, 2, 2, 2, 2, 1)
    assert main([written, "--devices=2"]) == 0


def test_a_graph_is_planned_where_no_chain_fits(tmp_path, capsys):
    nodes = (Node("stem", 1, 1, 3, 3), Node("left", 1, 4, 1, 5), Node("right", 2, 2, 5, 4))
    (tmp_path / "graph.json").write_text(json.dumps(ComputationGraph(nodes, ((0, 1), (0, 2))).to_state()))
    settings = [tmp_path / "graph.json", "--devices=4", "--micro-batches=4", "--max-width=1"]
    assert main([*settings, f"--memory-gb={10 / 2**30}", "--out", tmp_path / "out"]) == 0
    assert "best chain: none fits into the memory" in capsys.readouterr().out


def test_an_example_is_known_by_name(capsys):
    assert main(["candle-uno", "--devices=4", "--memory-gb=4"]) == 0
    assert "feature0" in capsys.readouterr().out


HOSTILE = "\x1b]0;owned\x07\x1b[2J[/x]\u202e"


def state_with(**values):
    node = {"name": "a", "forward_s": 1.0, "backward_s": 2.0}
    return {"nodes": [node, {**node, "name": "b", **values}], "edges": [[0, 1]]}


@pytest.mark.parametrize("name", ["[/x]", "[red]", HOSTILE, "a\nb", "\ud800", "x" * 100_000])
def test_a_name_is_neither_markup_nor_an_order_to_the_terminal(name, tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(state_with(name=name)))
    assert main([path, "--devices=2", "--max-width=1"]) == 0
    told = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in told.out + told.err)
    path.write_text(json.dumps(state_with(name=name, activation_bytes=-1)))
    assert main([path, "--devices=2"]) == 2
    told = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in told.out + told.err)


@pytest.mark.parametrize("key", ["forward_s", "backward_s", "activation_bytes", "parameter_bytes", "output_bytes"])
@pytest.mark.parametrize("value", [10**400, 1e308, 1e-320, -1, float("nan"), float("inf"), "1", True, None, [], 2**63])
def test_a_cost_that_no_node_has_is_refused(key, value, tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(state_with(**{key: value})))
    assert main([path, "--devices=2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("settings", [["--devices=1000000000"], ["--devices=2", "--micro-batches=9999999"]])
def test_settings_have_bounds(settings, capsys):
    assert main(["dlrm", *settings]) == 2
    assert "expected a whole number from 1 to 4096" in capsys.readouterr().err


@pytest.mark.parametrize("count", [3000, 100_000])
def test_a_graph_that_would_take_minutes_is_refused(count, tmp_path, capsys):
    nodes = [{"name": str(number), "forward_s": 1, "backward_s": 1} for number in range(count)]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": nodes, "edges": [[number, number + 1] for number in range(count - 1)]}))
    began = time.monotonic()
    assert main([path, "--devices=4"]) == 2
    assert time.monotonic() - began < 5
    assert re.search("would take minutes|more than 5000 nodes", capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_graph_is_an_ordinary_file(kind, tmp_path, capsys):
    path = tmp_path / "graph.json"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert main([path, "--devices=2"]) == 2
    assert "model must be" in capsys.readouterr().err


def test_no_picture_or_plan_is_written_through_a_link(graph, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("plan.json", "timelines.png"):
        (tmp_path / name).write_text("mine")
        (tmp_path / "out" / name).symlink_to(tmp_path / name)
    assert main([graph, "--devices=2", "--out", tmp_path / "out"]) == 0
    assert [(tmp_path / name).read_text() for name in ("plan.json", "timelines.png")] == ["mine"] * 2


def test_the_plan_for_programs(graph, capsys):
    assert main([graph, "--devices=6", "--micro-batches=4", "--max-width=1", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).in_flight == (3, 2, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dlrm"], "the following arguments are required: --devices"),
        (["dlrm", "--devices=many"], "expected a whole number from 1 to 4096, got 'many'"),
        (["dlrm", "--devices=0"], "expected a whole number from 1 to 4096, got '0'"),
        (["dlrm", "--devices=2", "--memory-gb=none"], "expected a positive number below"),
        (["dlrm", "--devices=2", "--memory-gb=0.001"], "fits into"),
        (["nothing", "--devices=2"], "model must be one of candle-uno"),
        (["dlrm", "--device=2", "--out"], "expected one argument"),
        (["dlrm", "devices=2"], "the following arguments are required: --devices"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("egeria plan: ")
    assert message in line


@pytest.mark.parametrize("text", [b"", b"3", b"{}", b'{"graph": {}}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_bytes(text)
    assert main([path, "--devices=2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_matplotlib_it_says_so(graph, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lightning_egeria.methods.pipelining.drawing", raising=False)
    assert main([graph, "--devices=2", "--out", tmp_path / "out"]) == 2
    assert "lightning-egeria[report]" in capsys.readouterr().err
