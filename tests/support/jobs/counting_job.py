"""A small real job: trains, keeps a checkpoint after each epoch, and goes on from it when it is started again.

python counting_job.py EPOCHS, as a job of `egeria jobs`
"""

import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 32


class Counting(L.LightningModule):
    """Counts the samples that it was trained on, in all runs that led to its state."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(SAMPLES))

    def training_step(self, batch, batch_idx):
        numbers, values = batch
        counts = torch.zeros(SAMPLES)
        counts[numbers] += 1
        self.seen += self.all_gather(counts).reshape(-1, SAMPLES).sum(0)
        time.sleep(0.05)
        return self.net(values).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} on {self.trainer.world_size}", flush=True)


def main() -> None:
    """Train."""
    folder, devices = Path(os.environ["EGERIA_CHECKPOINTS"]), int(os.environ["EGERIA_JOB_DEVICES"])
    epochs = int(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 4)), 8)
    module = Counting()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=1, save_on_train_epoch_end=True)],
    )
    last = folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        (Path(os.environ["EGERIA_RESULTS"]) / "seen").write_text(" ".join(str(int(count)) for count in module.seen))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
