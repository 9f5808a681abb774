"""Branch tuning from a bad learning rate, beside other ways to find one: accuracy on digits, and samples trained.

Every call of the training step counts: trials, range tests, runs that were pruned, and the forward passes of trials
without learning. A run is the samples of one plain run. Optuna (TPE, successive halving by the loss of each epoch) may
train as many samples as the tuner, and its network is that of the trial with the least loss. The best of the grid is
the one with the best accuracy on the test set, which no other method sees.

python benchmarks/branch_tuning.py            # three seeds, some minutes on one core
python benchmarks/branch_tuning.py --epochs 1 --seeds 1
"""

import argparse
import itertools
import logging
import statistics
import tempfile
import warnings

import lightning as L
import optuna
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import BranchTuner, LogUniform

GRID = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
LOW, HIGH = 1e-5, 10.0  # what the others search
BAD = (3e-4, 1.0)  # 100 times too small and 30 times too large for this network
SAMPLES = 1400  # of 1797, to train


class Digits(L.LightningModule):
    """A convolutional network of two layers, with SGD."""

    samples = 0  # that all networks have trained on

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
        Digits.samples += len(labels)
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data():
    """Images and labels to train and to test with."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in (order[:SAMPLES], order[SAMPLES:])]


class Losses(L.Callback):
    """Tells the mean loss of each epoch."""

    def __init__(self, tell):
        self.tell, self.losses = tell, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.tell(trainer, statistics.fmean(self.losses))
        self.losses.clear()


def trained(lr, seed, epochs, *callbacks):
    """Accuracy after a run, and the samples that it took."""
    L.seed_everything(seed, verbose=False)
    before = Digits.samples
    train, test = data()
    module = Digits(lr)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), default_root_dir=folder, **quiet)
        trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))
    images, labels = test.tensors
    module.eval()
    with torch.no_grad():
        return float((module.net(images).argmax(1) == labels).float().mean()), Digits.samples - before


def pruned_search(seed, epochs, budget):
    """Accuracy of the network with the least loss of its last epoch, among those that a budget of samples trains."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study, before, found = optuna.create_study(sampler=sampler, pruner=pruner), Digits.samples, []
    while Digits.samples - before < budget:
        trial = study.ask()
        steps, last = itertools.count(1), []

        def tell(trainer, loss, trial=trial, steps=steps, last=last):
            last.append(loss if loss == loss else 1e9)
            trial.report(last[-1], next(steps))
            trainer.should_stop = trial.should_prune() or Digits.samples - before >= budget

        accuracy, _ = trained(trial.suggest_float("lr", LOW, HIGH, log=True), seed, epochs, Losses(tell))
        study.tell(trial, last[-1])
        found.append((last[-1], accuracy))
    return min(found)[1], Digits.samples - before


def main():
    """Print a line for each run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = {}
    for seed in range(arguments.seeds):

        def note(method, result, seed=seed):
            rows.setdefault(method, []).append(result)
            print(f"seed {seed}, {method}: {result[0]:.2%} for {result[1]} samples", flush=True)
            return result

        grid = {lr: trained(lr, seed, arguments.epochs) for lr in GRID}
        whole = grid[GRID[0]][1]
        accuracy, rate = max((accuracy, rate) for rate, (accuracy, _) in grid.items())
        note(f"best of a grid of {len(GRID)}", (accuracy, whole * len(GRID)))
        print(f"at {rate:g}")
        budgets = []
        for lr in BAD:
            note(f"plain, from {lr:g}", trained(lr, seed, arguments.epochs))
            tuner = BranchTuner({"lr": LogUniform(LOW, HIGH)}, seed=seed)
            budgets.append(note(f"BranchTuner, from {lr:g}", trained(lr, seed, arguments.epochs, tuner))[1])
            finder = LearningRateFinder(min_lr=LOW, max_lr=HIGH, num_training_steps=100)
            note(f"LearningRateFinder, from {lr:g}", trained(lr, seed, arguments.epochs, finder))
        note("Optuna with pruning", pruned_search(seed, arguments.epochs, max(budgets)))
    print("\n| | accuracy | lowest | cost in runs |\n|---|---|---|---|")
    for method, results in rows.items():
        accuracies, samples = zip(*results, strict=True)
        cost = statistics.fmean(samples) / whole
        print(f"| {method} | {statistics.fmean(accuracies):.1%} | {min(accuracies):.1%} | {cost:.2f} |")


if __name__ == "__main__":
    main()
