"""The notebooks run from top to bottom, do what they promise, and show the outputs of their sources."""

import re

import nbformat
import pytest

from lightning_egeria.core.training.freezer import FreezingEvent
from notebooks.execute import NOTEBOOKS, PROMISES, digest, execute
from support.ranks import LOCAL

OUTPUTS_BYTES = 350_000


def test_each_notebook_promises_something():
    assert {path.stem for path in NOTEBOOKS} == set(PROMISES)
    assert all("assert " in promise for promise in PROMISES.values())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_belong_to_the_sources(path):
    notebook = nbformat.read(path, 4)
    assert notebook.metadata.get("lightning_egeria", {}).get("sources") == digest(notebook), "run `make notebooks`"
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_have_the_messages_of_today(path):
    """They go stale when a message changes, though the sources stay."""
    event = re.compile(
        r"step \d+: (froze \d+ of \d+ layer modules, up to '.+'|unfroze, \d+ of \d+ layer modules stay frozen): .+"
    )
    for kind in ("freeze", "unfreeze"):
        assert event.fullmatch(FreezingEvent(3, kind, 1, "scheduled").describe(["stem", "head"]))
    outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
    lines = [line for output in outputs for line in output.get("text", "").splitlines()]
    said = [line for line in lines if re.match(r"step \d+: (un)?froze", line)]
    assert [line for line in said if not event.fullmatch(line)] == [], "run `make notebooks`"


def test_outputs_are_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < OUTPUTS_BYTES


@pytest.mark.slow
# Of the Jupyter client: it says which transport it uses.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    notebook = execute(path, tmp_path)
    assert digest(notebook) == notebook.metadata["lightning_egeria"]["sources"]
    texts = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "the reference model failed" not in texts
