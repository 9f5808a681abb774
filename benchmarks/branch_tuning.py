"""Branch tuning from bad learning rates, 100 times too small and 30 times too large, beside other ways to find one.

Printed are the accuracy, on digits or a workload of the proof, and the samples that were trained.

Every call of the training step counts: trials, range tests, runs that were pruned, and the forward passes of trials
without learning. A run is the samples of one plain run. Optuna (TPE, successive halving by the loss of each epoch) may
train as many samples as the tuner, and its network is that of the trial with the least loss. The best of the grid is
the one with the best accuracy on the test set, which no other method sees.

python -m benchmarks.branch_tuning            # three seeds, some minutes on one core
python -m benchmarks.branch_tuning --epochs 1 --seeds 0
python -m benchmarks.branch_tuning --workload cifar10_resnet20 --data FOLDER --override trainer.max_epochs=4
"""

import argparse
import itertools
import logging
import statistics
import tempfile
import warnings

import hydra
import lightning as L
import optuna
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from sklearn.datasets import load_digits
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.proof.run import configured
from lightning_egeria import BranchTuner, LogUniform


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

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/acc", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class DigitsRuns:
    """Runs on 1400 of the 1797 digits; the others are the test set."""

    grid, bad = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0), (3e-4, 1.0)

    def __init__(self, epochs):
        self.epochs = epochs

    def parts(self, lr):
        """Model, data and Trainer arguments of a run."""
        images, labels = load_digits(return_X_y=True)
        images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        train, test = (TensorDataset(images[part], labels[part]) for part in (order[:1400], order[1400:]))
        loaders = {"train_dataloaders": DataLoader(train, 32, shuffle=True), "val_dataloaders": DataLoader(test, 397)}
        return Digits(lr), loaders, {"max_epochs": self.epochs}


class ProofRuns:
    """Runs of a workload of the proof. The grid is around its own learning rate."""

    def __init__(self, workload, size, data, overrides):
        self.options = workload, size, data
        self.overrides = overrides
        rate = configured(*self.options, self.overrides).model.optimizer.lr
        self.grid = tuple(rate * factor for factor in (0.1, 0.3, 1, 3, 10))
        self.bad = rate / 100, rate * 30

    def parts(self, lr):
        """Model, data and Trainer arguments of a run."""
        config = configured(*self.options, [*self.overrides, f"model.optimizer.lr={lr}"])
        trainer = {name: value for name, value in config.trainer.items() if name != "_target_"}
        model = hydra.utils.instantiate(config.model)
        return model, {"datamodule": hydra.utils.instantiate(config.data)}, trainer


class Samples:
    """Counts the samples of all calls of training steps."""

    trained = 0

    @classmethod
    def counted(cls, module):
        """The module, counting."""

        def training_step(self, batch, batch_idx):
            Samples.trained += len(tree_leaves(batch)[-1])
            return super(counting, self).training_step(batch, batch_idx)

        counting = type(type(module).__name__, (type(module),), {"training_step": training_step})
        module.__class__ = counting
        return module


class Losses(L.Callback):
    """Tells the mean loss of each epoch."""

    def __init__(self, tell):
        self.tell, self.losses = tell, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.tell(trainer, statistics.fmean(self.losses))
        self.losses.clear()


def trained(runs, lr, seed, *callbacks):
    """Accuracy after a run, and the samples that it took."""
    L.seed_everything(seed, verbose=False)
    before = Samples.trained
    module, data, arguments = runs.parts(lr)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"accelerator": "cpu"} | arguments | quiet | {"default_root_dir": folder}
        trainer = L.Trainer(**arguments, callbacks=list(callbacks))
        trainer.fit(Samples.counted(module), **data)
    return float(trainer.callback_metrics["val/acc"]), Samples.trained - before


def pruned_search(runs, seed, low, high, budget):
    """Accuracy of the network with the least loss of its last epoch, among those that a budget of samples trains."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study, before, found = optuna.create_study(sampler=sampler, pruner=pruner), Samples.trained, []
    while Samples.trained - before < budget:
        trial = study.ask()
        steps, last = itertools.count(1), []

        def tell(trainer, loss, trial=trial, steps=steps, last=last):
            last.append(loss if loss == loss else 1e9)
            trial.report(last[-1], next(steps))
            trainer.should_stop = trial.should_prune() or Samples.trained - before >= budget

        accuracy, _ = trained(runs, trial.suggest_float("lr", low, high, log=True), seed, Losses(tell))
        study.tell(trial, last[-1])
        found.append((last[-1], accuracy))
    return min(found)[1], Samples.trained - before


def main():
    """Print a line for each run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workload", help="of the proof, instead of digits; with the grid only")
    parser.add_argument("--size", default="small")
    parser.add_argument("--data", default="data", help="folder with the workload's data")
    parser.add_argument("--override", action="append", default=[], help="of the workload's configuration")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    others = not arguments.workload
    runs = DigitsRuns(arguments.epochs)
    if arguments.workload:
        runs = ProofRuns(arguments.workload, arguments.size, arguments.data, arguments.override)
    low, high = runs.grid[0] / 10, runs.grid[-1] * 3
    rows = {}
    for seed in arguments.seeds:

        def note(method, result, seed=seed):
            rows.setdefault(method, []).append(result)
            print(f"seed {seed}, {method}: {result[0]:.2%} for {result[1]} samples", flush=True)
            return result

        grid = {lr: trained(runs, lr, seed) for lr in runs.grid}
        whole = grid[runs.grid[0]][1]
        accuracy, rate = max((accuracy, rate) for rate, (accuracy, _) in grid.items())
        note(f"best of a grid of {len(runs.grid)}", (accuracy, whole * len(runs.grid)))
        print(f"at {rate:g}; {', '.join(f'{lr:g}: {got:.2%}' for lr, (got, _) in grid.items())}", flush=True)
        budgets = []
        for lr in runs.bad:
            note(f"plain, from {lr:g}", trained(runs, lr, seed))
            tuner = BranchTuner({"lr": LogUniform(low, high)}, seed=seed)
            budgets.append(note(f"BranchTuner, from {lr:g}", trained(runs, lr, seed, tuner))[1])
            if not others:
                continue
            finder = LearningRateFinder(min_lr=low, max_lr=high, num_training_steps=100)
            note(f"LearningRateFinder, from {lr:g}", trained(runs, lr, seed, finder))
        if others:
            note("Optuna with pruning", pruned_search(runs, seed, low, high, max(budgets)))
    print("\n| | accuracy | lowest | cost in runs |\n|---|---|---|---|")
    for method, results in rows.items():
        accuracies, samples = zip(*results, strict=True)
        cost = statistics.fmean(samples) / whole
        print(f"| {method} | {statistics.fmean(accuracies):.1%} | {min(accuracies):.1%} | {cost:.2f} |")


if __name__ == "__main__":
    main()
