"""Whole programs, as users run them: the same objects and values before, during and after a fit, and after an error."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.ranks import LOCAL

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "whole_program.py"
WAYS = 16


def environment():
    return {**os.environ, **LOCAL, "PYTHONPATH": os.pathsep.join(map(str, (FOLDER.parent.parent, FOLDER.parent)))}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([str(PROGRAM)], id="script"),
        pytest.param(["-c", PROGRAM.read_text()], id="-c", marks=pytest.mark.slow),
    ],
)
def test_a_script_keeps_its_objects(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert sum(": (" in line for line in done.stdout.splitlines()) == WAYS, done.stdout


@pytest.mark.slow  # a kernel takes seconds to start
@pytest.mark.filterwarnings("ignore")  # of the Jupyter client
def test_a_notebook_keeps_its_objects(tmp_path, monkeypatch):
    for name, value in {**environment(), "IPYTHONDIR": str(tmp_path / "ipython")}.items():
        monkeypatch.setenv(name, value)
    text = PROGRAM.read_text().replace('if __name__ == "__main__":\n    main()\n', "")
    cells = [nbformat.v4.new_code_cell(source) for source in (text, "main()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].outputs if output.get("name") == "stdout")
    assert sum(": (" in line for line in printed.splitlines()) == WAYS, printed


@pytest.mark.slow
def test_a_setting_that_the_reference_process_does_not_have_is_named(tmp_path):
    """A module that the script imports is imported again in the reference process, with its first values."""
    (tmp_path / "settings.py").write_text("SCALE = 1.0\n")
    (tmp_path / "program.py").write_text(
        "import lightning as L, settings, sys, torch\n"
        "from torch import nn\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing\n"
        "class Layer(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return torch.relu(super().forward(x)) * settings.SCALE + settings.SCALE\n"
        "class Net(L.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 2))\n"
        "    def training_step(self, batch, index):\n"
        "        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), 0.01)\n"
        "settings.SCALE = float(sys.argv[1])\n"
        "policy = FreezingPolicy(1e-9, pretrained=True, trial=False)\n"
        "callback = KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2,\n"
        "    background=True, deterministic=True, timeout_s=600.0)\n"
        "data = DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 2), 8)\n"
        "L.Trainer(accelerator='cpu', max_epochs=3, logger=False, enable_checkpointing=False,\n"
        "    enable_progress_bar=False, callbacks=[callback]).fit(Net(), data)\n"
    )
    said = []
    for scale in ("1", "3"):
        program = [sys.executable, "program.py", scale]
        done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stderr
        said.append(done.stderr.count("does not run the network as this process does"))
    assert said == [0, 1]
