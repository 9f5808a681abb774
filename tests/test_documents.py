"""The Python blocks of the README and of the method cards run as they stand."""

import functools
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "lightning_egeria").rglob("README.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.head(self.encoder(batch[0])).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)


def test_there_is_something_to_run():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_runs(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    monkeypatch.setattr(L, "Trainer", functools.partial(L.Trainer, max_epochs=2, enable_model_summary=False, **quiet))
    exec(compile(block, "block", "exec"), {"model": Module(), "datamodule": Data()})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tests_that_are_named_exist(document):
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    missing = {name for name in named if f"def {name}(" not in sources}
    assert not missing
