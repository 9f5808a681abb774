"""Branch tuning from a bad learning rate, beside a grid of whole runs: accuracy on digits, and its cost in runs.

python benchmarks/branch_tuning.py            # three seeds, about three minutes on one core
python benchmarks/branch_tuning.py --epochs 1 --seeds 1
"""

import argparse
import logging
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import BranchTuner, LogUniform

GRID = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
BAD = (3e-4, 1.0)  # 100 times too small and 30 times too large for this network
SAMPLES = 1400  # of 1797, to train


class Digits(L.LightningModule):
    """A convolutional network of two layers, with SGD."""

    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data():
    """Images and labels to train and to test with."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in (order[:SAMPLES], order[SAMPLES:])]


def trained(lr, seed, epochs, *callbacks):
    """Accuracy after a run, and its optimizer steps."""
    L.seed_everything(seed, verbose=False)
    train, test = data()
    module = Digits(lr)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **quiet)
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))
    images, labels = test.tensors
    module.eval()
    with torch.no_grad():
        return float((module.net(images).argmax(1) == labels).float().mean()), trainer.global_step


def main():
    """Print one line for each seed and starting rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("seed  best of the grid      plain from -> accuracy   tuned to -> accuracy   cost in runs (the grid: 8)")
    for seed in range(arguments.seeds):
        grid = {lr: trained(lr, seed, arguments.epochs)[0] for lr in GRID}
        best = max(grid, key=grid.get)
        for lr in BAD:
            tuner = BranchTuner({"lr": LogUniform(1e-5, 10)}, seed=seed)
            plain, _ = trained(lr, seed, arguments.epochs)
            accuracy, steps = trained(lr, seed, arguments.epochs, tuner)
            record = tuner.searches[0]
            kept = record.trial_steps if record.winner is not None else 0
            cost = (steps - kept + record.steps) / steps
            print(
                f"{seed:<5} {grid[best]:.4f} at {best:<9g} {lr:>10g} -> {plain:.4f} "
                f"{tuner.setting['lr']:>16.3g} -> {accuracy:.4f} {cost:>12.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
