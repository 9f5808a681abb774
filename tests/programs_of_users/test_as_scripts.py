"""Programs that run as scripts, in processes of their own, with the defaults of the callback."""

import os
import subprocess
import sys
import textwrap

import pytest

from support.leftovers import REPOSITORY

START = """
import sys
import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy

torch.set_num_threads(1)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.strict_loading = False
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(4)))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def on_save_checkpoint(self, checkpoint):
        keep = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in keep}

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def fit(module, *callbacks, ckpt_path=None, **arguments):
    L.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator))
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "max_epochs": 4}
    trainer = L.Trainer(callbacks=list(callbacks), enable_model_summary=False, **settings | arguments)
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    return trainer
"""

RESUMES = """
if __name__ == "__main__":
    folder = sys.argv[1]
    whole, resumed = Net(), Net()
    fit(whole, KnowledgeGuidedFreezing(ScriptedPolicy({12: 2})), enable_checkpointing=False)
    fit(Net(), KnowledgeGuidedFreezing(ScriptedPolicy({12: 2})), ModelCheckpoint(folder, save_last=True), max_epochs=2)
    fit(resumed, KnowledgeGuidedFreezing(ScriptedPolicy({12: 2})), ckpt_path=f"{folder}/last.ckpt")
    pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    print("equal")
"""

SPAWNS = """
class Spread(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        mine = torch.cat([p.detach().flatten() for p in module.parameters()])
        both = trainer.strategy.all_gather(mine)
        assert torch.equal(both[0], both[1]), float((both[0] - both[1]).abs().max())


if __name__ == "__main__":
    released = BackboneFinetuning(1, initial_denom_lr=2)
    freezing = KnowledgeGuidedFreezing()
    fit(Net(), Spread(), released, freezing, devices=2, strategy="ddp_spawn", enable_checkpointing=False)
    print("equal")
"""


@pytest.mark.parametrize("program", [pytest.param(RESUMES, id="resumes"), pytest.param(SPAWNS, id="spawns")])
@pytest.mark.slow
def test_a_script_ends_well(program, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(START) + program)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout
