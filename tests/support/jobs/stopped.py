"""A run that is stopped at any step and goes on, as the tests of checkpoints train it."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import ResumableCheckpoints

EPOCHS, BATCHES = 3, 4


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": by_epoch, "interval": "epoch"}]


class Stop(L.Callback):
    """Sends the signal to stop within a step."""

    def __init__(self, step):
        self.step = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


class Slow(L.Callback):
    """Makes each step last, so that it can be stopped from outside."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(self.seconds)


def fit(
    folder,
    stop=None,
    resume=False,
    every_n_steps=None,
    workers=0,
    accumulate=1,
    seconds=0.0,
    wrap=None,
    callbacks=None,
    ckpt_path=None,
    model=None,
    **options,
):
    """Train; return the weights at the end, or the exit status if it was stopped."""
    L.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(8 * BATCHES, 4, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)
    callbacks = [ResumableCheckpoints(every_n_steps, folder)] if callbacks is None else callbacks
    callbacks = [*callbacks, *([] if stop is None else [Stop(stop)]), Slow(seconds)]
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=EPOCHS,
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        **options,
    )
    model = Net() if model is None else model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        try:
            ckpt_path = ckpt_path or (callbacks[0].path if resume else None)
            if wrap is None:
                trainer.fit(model, loader, DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
            else:
                trainer.fit(model, datamodule=wrap(loader, DataLoader(data, batch_size=8)), ckpt_path=ckpt_path)
        except SystemExit as end:
            return int(end.code)
    return {name: value.clone() for name, value in model.state_dict().items()}


def main():
    """Be a job of `egeria jobs`: go on from its checkpoint, and leave the weights in its results."""
    folder, results = (Path(os.environ[f"EGERIA_{name}"]) for name in ("CHECKPOINTS", "RESULTS"))
    weights = fit(folder, resume=(folder / "last.ckpt").exists(), every_n_steps=1, seconds=float(sys.argv[1]))
    if isinstance(weights, int):
        sys.exit(weights)
    torch.save(weights, results / "weights.pt")


if __name__ == "__main__":
    main()
