"""The notebooks run from top to bottom, and are stored without what they print."""

import nbformat
import pytest
from conftest import REPOSITORY
from nbclient import NotebookClient
from ranks import LOCAL

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 600  # of a cell


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.slow
# Of the Jupyter client: it says which transport it uses.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notebook = nbformat.read(path, 4)
    work = tmp_path / "work"
    work.mkdir()
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(work)}}).execute()
    printed = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in printed) or path.stem.startswith("4")
    complaints = [
        o.text for o in printed if o.output_type == "stream" and "freezing: the reference model failed" in o.text
    ]
    assert not complaints
