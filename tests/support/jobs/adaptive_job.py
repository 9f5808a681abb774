"""A small real job that adapts its batch size: it keeps a checkpoint and writes hints, and goes on when started again.

python adaptive_job.py EPOCHS, as a job of `egeria jobs`

A sample takes a millisecond in each process, so two processes are nearly twice as fast.
"""

import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import AdaptiveBatchSize

SAMPLES, BATCH = 192, 16
SAMPLE_S = 0.001


class Digits(L.LightningModule):
    """Classifies digits, and counts how often it was trained on each, in all runs that led to its state."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(SAMPLES))

    def training_step(self, batch, batch_idx):
        numbers, images, labels = batch
        counts = torch.zeros(SAMPLES)
        counts[numbers] += 1
        self.seen += self.all_gather(counts).reshape(-1, SAMPLES).sum(0)
        time.sleep(SAMPLE_S * len(labels))
        return torch.nn.functional.cross_entropy(self.net(images), labels)

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
    digits = load_digits()
    images = torch.tensor(digits.data[:SAMPLES], dtype=torch.float32) / 16
    data = TensorDataset(torch.arange(SAMPLES), images, torch.tensor(digits.target[:SAMPLES]))
    adaptive = AdaptiveBatchSize(
        DataLoader(data, BATCH // devices, shuffle=True),
        max_batch_size=64,
        change_every_n_steps=20,
        hints=os.environ["EGERIA_HINTS"],
    )
    module = Digits()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=5)],
    )
    trainer.fit(module, datamodule=adaptive, ckpt_path="last")
    if trainer.is_global_zero:
        (Path(os.environ["EGERIA_RESULTS"]) / "seen").write_text(" ".join(str(int(count)) for count in module.seen))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
